#!/bin/sh
# One machine: a Redis with a user for each role, engines and a gateway, as deploy/compose.yaml has them.
#
#   deploy/one_machine.sh build    builds the images; further words are options of build
#   deploy/one_machine.sh up       starts all of it, and returns when an engine and the gateway are ready
#   deploy/one_machine.sh trace    asks the gateway for a completion with a probe, as a client outside the containers
#   deploy/one_machine.sh down     stops all of it; Redis keeps its data on a volume
#
# The first `up` makes the users' passwords, the gateway's key, and the certificate of Redis, in deploy/secrets. A later one
# makes a certificate that ends soon anew: then restart Redis.
#
# CONTAINERS   docker (the default) or podman
# COMPOSE      the command that takes compose.yaml (default: docker compose, or podman-compose)
# ENGINES      how many engines `up` starts (default: 1)
# PATIENCE     how long `up` waits, in seconds (default: 600)
set -eu
cd "$(dirname "$0")/.."
secrets=deploy/secrets
containers=${CONTAINERS:-docker}
case $containers in
    docker) compose=${COMPOSE:-docker compose} ;;
    *) compose=${COMPOSE:-podman-compose} ;;
esac

# Runs compose with the passwords of the engines and the gateway.
compose() {
    TRACEWIRE_ENGINE_PASSWORD=$(cat $secrets/engine)
    TRACEWIRE_CONTROLLER_PASSWORD=$(cat $secrets/controller)
    export TRACEWIRE_ENGINE_PASSWORD TRACEWIRE_CONTROLLER_PASSWORD
    # Unquoted: the command may be two words.
    $compose -f deploy/compose.yaml --profile gateway "$@"
}

# The folder is closed to other users of the host. The files are not: users of the containers read them.
make_secrets() {
    mkdir -p -m 700 $secrets
    for user in $(sed -n 's/^user tracewire-\([a-z]*\) .*/\1/p' deploy/redis/users.acl) admin; do
        [ -s $secrets/$user ] || openssl rand -hex 24 > $secrets/$user
    done
    deploy/redis/certificates.sh $secrets/tls redis localhost 127.0.0.1
    chmod 644 $secrets/tls/ca.crt $secrets/tls/tls.crt $secrets/tls/tls.key
    chmod 755 $secrets/tls
    if [ ! -s $secrets/gateway-key ]; then
        made=$($containers run --rm tracewire-gateway gateway --new-key one-machine)
        # The first line is a comment with the key; the rest is the entry, which has its SHA-256 only.
        echo "$made" | sed '1d' > $secrets/gateway-keys.toml
        echo "$made" | sed -n '1s/.*: //p' > $secrets/gateway-key
    fi
}

build() {
    for image in engine-cpu:tracewire-engine-cpu gateway:tracewire-gateway; do
        $containers build -f deploy/Dockerfile --target "${image%%:*}" -t "${image#*:}" \
            ${TRACEWIRE_PYTHON_IMAGE:+--build-arg PYTHON_IMAGE="$TRACEWIRE_PYTHON_IMAGE"} "$@" .
    done
}

ready() {
    compose exec -T gateway tracewire ready --model demo
}

up() {
    compose up -d --no-build --scale engine="${ENGINES:-1}"
    until ready > /dev/null 2>&1; do
        if [ $(($(date +%s) - began)) -gt "${PATIENCE:-600}" ]; then
            compose ps
            echo "one_machine.sh: no engine or no gateway is ready after ${PATIENCE:-600} s: $compose -f deploy/compose.yaml logs" >&2
            exit 1
        fi
        sleep 2
    done
    echo "ready: gateway http://127.0.0.1:8080, its key in $secrets/gateway-key, Redis rediss://127.0.0.1:6379, its authority in $secrets/tls/ca.crt"
}

trace() {
    curl -sS --fail-with-body http://127.0.0.1:8080/v1/completions \
        -H "Authorization: Bearer $(cat $secrets/gateway-key)" -H 'Content-Type: application/json' \
        -d '{"model": "demo", "prompt": "def parse(text):", "max_tokens": 8, "tracewire":
             {"interventions": [{"do": "probe", "name": "norm", "at": "residual(4)", "reduce": "norm"}]}}'
    echo
}

began=$(date +%s)
command=${1:-}
[ $# -eq 0 ] || shift
case $command in
    build) build "$@" ;;
    up) make_secrets && up ;;
    trace) trace ;;
    down) compose down ;;
    *)
        sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" >&2
        exit 2
        ;;
esac
