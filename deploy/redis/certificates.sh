#!/bin/sh
# Makes what Redis needs for TLS, where it is not there yet: an authority of its own, and a certificate that it signs.
#
#   certificates.sh FOLDER NAME...
#
# The names are those by which clients reach Redis, in their URLs: host names and addresses. In the folder:
#
# ca.crt            the authority's certificate: clients name it by ssl_ca_certs
# tls.crt, tls.key  Redis's certificate and key, for 800 days
# ca.key            the authority's key, which signs the next certificate: keep it from Redis and from clients
#
# A certificate that ends within 30 days is made anew. Give the same names then.
set -eu
umask 077
[ $# -ge 2 ] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
folder=$1
shift
mkdir -p "$folder"
cd "$folder"
if [ -s tls.crt ] && openssl x509 -checkend 2592000 -noout -in tls.crt > /dev/null; then
    exit 0
fi

names=
for name in "$@"; do
    case $name in
        *:*) kind=IP ;;
        *[!0-9.]*) kind=DNS ;;
        *) kind=IP ;;
    esac
    names=$names${names:+,}$kind:$name
done
new=$(mktemp -d)
trap 'rm -rf "$new"' EXIT
cat > "$new/config" << END
[req]
distinguished_name = name
prompt = no
[name]
CN = $1
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectAltName = $names
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
END

if [ ! -s ca.key ] || [ ! -s ca.crt ]; then
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -days 7300 -config "$new/config" \
        -extensions authority -subj "/CN=authority of $1" -keyout "$new/ca.key" -out "$new/ca.crt" 2> /dev/null
    mv "$new/ca.key" ca.key
    mv "$new/ca.crt" ca.crt
fi
openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -config "$new/config" \
    -keyout "$new/tls.key" -out "$new/request" 2> /dev/null
openssl x509 -req -in "$new/request" -CA ca.crt -CAkey ca.key -set_serial "0x$(openssl rand -hex 16)" -days 800 \
    -extfile "$new/config" -extensions server -out "$new/tls.crt" 2> /dev/null
mv "$new/tls.key" tls.key
# Last: it says that all is there.
mv "$new/tls.crt" tls.crt
