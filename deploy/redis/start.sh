#!/bin/sh
# Starts redis-server with the users of users.acl, each with its password: `start.sh [options of redis-server]`.
#
# TRACEWIRE_ACL        the file with the users (default: users.acl beside this script)
# TRACEWIRE_SECRETS    folder with one file a user, named for its role (`engine`, `controller`, ...), that holds its
#                      password, and `admin` with that of the user `default` (default: /run/secrets)
# TRACEWIRE_RUN        folder for what is made of them (default: a new folder that nobody else can read)
#
# TRACEWIRE_TLS        `no` for a Redis without TLS
#
# Redis takes TLS connections only, on the port of `--tls-port` (default: 6379), with `tls.crt`, `tls.key` and `ca.crt` in
# the folder of passwords, which certificates.sh makes. The clients' URL begins with rediss://, and names the authority by
# ssl_ca_certs.
#
# Passwords are kept as SHA-256 only. A user without a file, or with an empty one, cannot log in.
set -eu
umask 077
acl=${TRACEWIRE_ACL:-$(dirname "$0")/users.acl}
secrets=${TRACEWIRE_SECRETS:-/run/secrets}
run=${TRACEWIRE_RUN:-$(mktemp -d)}
# Moved to its name when it is whole: a link of that name that somebody else has made is replaced, and not followed.
new=$(mktemp "$run/users.XXXXXX")
made=$run/users.acl

digest() {
    [ -e "$secrets/$1" ] || return 0
    # Without the line's end that editors leave. One that cannot be read must not pass for an empty one.
    secret=$(tr -d '\r\n' < "$secrets/$1") || exit 1
    [ -z "$secret" ] || printf '#%s' "$(printf %s "$secret" | sha256sum | cut -d ' ' -f 1)"
}

password=$(digest admin) || exit 1
if [ -n "$password" ]; then
    echo "user default on $password ~* &* +@all" >> "$new"
else
    echo "user default off" >> "$new"
fi
while read -r word name rules; do
    [ "$word" = user ] || continue
    password=$(digest "${name#tracewire-}") || exit 1
    # `resetpass` stands in the rules: what comes later counts.
    echo "user $name $rules $password" >> "$new"
done < "$acl"

mv -f "$new" "$made"
if [ "${TRACEWIRE_TLS:-yes}" != no ]; then
    for file in tls.crt tls.key ca.crt; do
        [ -s "$secrets/$file" ] || {
            echo "start.sh: $secrets/$file is missing: make it by certificates.sh, or set TRACEWIRE_TLS=no" >&2
            exit 1
        }
    done
    set -- --port 0 --tls-port 6379 --tls-cert-file "$secrets/tls.crt" --tls-key-file "$secrets/tls.key" \
        --tls-ca-cert-file "$secrets/ca.crt" --tls-auth-clients no "$@"
fi
exec redis-server --aclfile "$made" "$@"
