#!/bin/sh
# Starts redis-server with the users of users.acl, each with its password: `start.sh [options of redis-server]`.
#
# TRACEWIRE_ACL        the file with the users (default: users.acl beside this script)
# TRACEWIRE_SECRETS    folder with one file a user, named for its role (`engine`, `controller`, ...), that holds its
#                      password, and `admin` with that of the user `default` (default: /run/secrets)
# TRACEWIRE_RUN        folder for what is made of them (default: /tmp)
#
# Passwords are kept as SHA-256 only. A user without a file, or with an empty one, cannot log in.
set -eu
umask 077
acl=${TRACEWIRE_ACL:-$(dirname "$0")/users.acl}
secrets=${TRACEWIRE_SECRETS:-/run/secrets}
made=${TRACEWIRE_RUN:-/tmp}/users.acl

digest() {
    [ -e "$secrets/$1" ] || return 0
    # Without the line's end that editors leave. One that cannot be read must not pass for an empty one.
    secret=$(tr -d '\r\n' < "$secrets/$1") || exit 1
    [ -z "$secret" ] || printf '#%s' "$(printf %s "$secret" | sha256sum | cut -d ' ' -f 1)"
}

: > "$made"
password=$(digest admin) || exit 1
if [ -n "$password" ]; then
    echo "user default on $password ~* &* +@all" >> "$made"
else
    echo "user default off" >> "$made"
fi
while read -r word name rules; do
    [ "$word" = user ] || continue
    password=$(digest "${name#tracewire-}") || exit 1
    # `resetpass` stands in the rules: what comes later counts.
    echo "user $name $rules $password" >> "$made"
done < "$acl"

exec redis-server --aclfile "$made" "$@"
