#!/bin/sh
# Makes the base images of deploy/ from Debian's packages, for machines that reach no registry of images:
#
#   deploy/debian/images.sh [options of build]
#   export TRACEWIRE_PYTHON_IMAGE=localhost/tracewire-debian-python TRACEWIRE_REDIS_IMAGE=localhost/tracewire-debian-redis
#
# Images that are there already stay: remove localhost/tracewire-debian to take newer packages. It needs mmdebstrap, and root
# or mmdebstrap's own ways without it. CONTAINERS: docker (the default) or podman.
set -eu
cd "$(dirname "$0")"
containers=${CONTAINERS:-docker}

if ! $containers image inspect localhost/tracewire-debian > /dev/null 2>&1; then
    mmdebstrap --quiet --variant=minbase --include=ca-certificates,python3,python3-venv bookworm - |
        $containers import - localhost/tracewire-debian
fi
for target in python redis; do
    $containers build --target "$target" -t "localhost/tracewire-debian-$target" "$@" .
done
