#!/bin/sh
# Make the two bases of the images from Debian's packages, where there is no registry: localhost/debian-python, for running, and
# localhost/debian-python-build, for building. Wants root, mmdebstrap and buildah.
#   base.sh [OPTION OF BUILDAH]...
set -eu
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT

# Packages are unpacked and not configured, hence no package manager in the image. These lines do what their scripts would have done.
CONFIGURE='
cat /usr/share/ca-certificates/mozilla/*.crt >/etc/ssl/certs/ca-certificates.crt
printf "root:x:0:0:root:/root:/bin/sh\ntidemill:x:1000:1000::/run/tidemill:/bin/sh\n" >/etc/passwd
printf "root:x:0:\ntidemill:x:1000:\n" >/etc/group
find /usr/share/doc -type f ! -name copyright -delete
rm -rf /usr/share/man /usr/share/info /usr/share/locale /usr/share/gdb /var/cache/apt /var/lib/apt
'

base() {
    name=$1 packages=$2
    shift 2
    mmdebstrap --quiet --variant=extract --include="$packages" --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr \
        --aptopt='Acquire::Languages "none"' bookworm "$directory/base.tar"
    container=$(buildah "$@" from scratch)
    buildah "$@" add --quiet "$container" "$directory/base.tar" / >/dev/null
    buildah "$@" run --isolation chroot "$container" sh -eu -c "$CONFIGURE"
    buildah "$@" commit --quiet --rm "$container" "localhost/$name" >/dev/null
    rm "$directory/base.tar"
}

RUN=base-files,libc-bin,dash,coreutils,grep,sed,findutils,netbase,tzdata,python3,ca-certificates,libstdc++6
base debian-python "$RUN" "$@"
base debian-python-build "$RUN,python3-venv,binutils" "$@"
