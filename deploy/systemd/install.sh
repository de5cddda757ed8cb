#!/bin/sh
# Installs a Redis, an engine of the demo model and a gateway as services of systemd, as root: deploy/systemd/install.sh
#
# It needs openssl, redis-server 7 or later, and an environment with Tracewire in /opt/tracewire/venv (docs/deployment.md).
# What is there already stays: passwords, the gateway's key, certificates, and the files in /etc/tracewire. Run it again
# before Redis's certificate ends (800 days), and restart Redis.
set -eu
cd "$(dirname "$0")/.."
etc=/etc/tracewire
tracewire=/opt/tracewire/venv/bin/tracewire
"$tracewire" --version > /dev/null
umask 077

for user in tracewire tracewire-redis; do
    id "$user" > /dev/null 2>&1 || useradd --system --home-dir /nonexistent --shell /usr/sbin/nologin "$user"
done
install -d -m 755 /opt/tracewire /opt/tracewire/redis "$etc"
install -m 755 redis/start.sh /opt/tracewire/redis/
install -m 644 redis/users.acl /opt/tracewire/redis/
install -m 644 systemd/*.service /etc/systemd/system/

install -d -m 750 -g tracewire-redis "$etc/secrets"
for user in $(sed -n 's/^user tracewire-\([a-z]*\) .*/\1/p' redis/users.acl) admin; do
    [ -s "$etc/secrets/$user" ] || openssl rand -hex 24 > "$etc/secrets/$user"
    chgrp tracewire-redis "$etc/secrets/$user"
    chmod 640 "$etc/secrets/$user"
done
# Redis's key is Redis's alone. Everybody on this host may read its authority's certificate.
redis/certificates.sh "$etc/tls" localhost 127.0.0.1 "$(hostname)"
install -m 640 -g tracewire-redis "$etc/tls/ca.crt" "$etc/tls/tls.crt" "$etc/tls/tls.key" "$etc/secrets/"
install -m 644 "$etc/tls/ca.crt" "$etc/ca.crt"
[ -e "$etc/engine-demo.env" ] || cat > "$etc/engine-demo.env" << END
MODEL=demo
OPTIONS=--capacity 64
TRACEWIRE_URL=rediss://tracewire-engine:$(cat "$etc/secrets/engine")@127.0.0.1:6379?ssl_ca_certs=$etc/ca.crt
END
[ -e "$etc/gateway.env" ] || cat > "$etc/gateway.env" << END
TRACEWIRE_URL=rediss://tracewire-controller:$(cat "$etc/secrets/controller")@127.0.0.1:6379?ssl_ca_certs=$etc/ca.crt
END
if [ ! -e "$etc/gateway-keys.toml" ]; then
    made=$("$tracewire" gateway --new-key this-host)
    # The first line is a comment with the key; the rest is the entry, which has its SHA-256 only.
    echo "$made" | sed -n '1s/.*: //p' > "$etc/gateway-key"
    echo "$made" | sed '1d' > "$etc/gateway-keys.toml"
    chgrp tracewire "$etc/gateway-keys.toml"
    chmod 640 "$etc/gateway-keys.toml"
fi
systemctl daemon-reload
