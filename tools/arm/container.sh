#!/usr/bin/env bash
# Builds packaging/Containerfile for arm64 on another machine, starts it emulated and asks it something.
#
#   tools/arm/container.sh [FOLDER]     what is kept between calls (default: ~/.cache/edgekv/arm-container)
#
# Needs root, buildah, mmdebstrap and curl, and qemu's user emulation (8.1 or newer: earlier ones show programs the
# host's /proc/cpuinfo) registered for arm64 with binfmt_misc: on Debian 13, apt-get install buildah mmdebstrap
# qemu-user-binfmt. Where no registry of images can be reached, the base is Debian's arm64 packages with Python, made by
# mmdebstrap; BASE names an image to be taken instead. SSL_CERT_FILE, if set, is used inside, too.
set -euo pipefail

tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/edgekv/arm-container}
suite=trixie
port=18080
key=secret
export BUILDAH_ISOLATION=chroot
buildah=(buildah --root "$folder/storage" --runroot "$folder/run")
mkdir -p "$folder"

die() {
    printf 'tools/arm/container.sh: %s\n' "$1" >&2
    exit 1
}

if [[ -z ${BASE:-} ]]; then
    BASE=localhost/debian-python
    if ! "${buildah[@]}" inspect "$BASE" >"$folder/base.json" 2>&1; then
        [[ -s $folder/$suite.tar ]] || mmdebstrap --architectures=arm64 --variant=minbase \
            --include=python3,python3-venv,ca-certificates "$suite" "$folder/$suite.tar"
        container=$("${buildah[@]}" from --arch arm64 scratch)
        "${buildah[@]}" add -q "$container" "$folder/$suite.tar" /
        "${buildah[@]}" commit -q --rm "$container" "$BASE"
    fi
fi

volumes=()
[[ -z ${SSL_CERT_FILE:-} ]] || volumes=(--volume "$SSL_CERT_FILE:/etc/ssl/certs/ca-certificates.crt:ro")
"${buildah[@]}" build -q --layers --platform linux/arm64 --pull-never --build-arg "BASE=$BASE" "${volumes[@]}" \
    -t edgekv -f "$tree/packaging/Containerfile" "$tree"

# Emulated, everything takes long: dense, whose kernels compile soonest, and a short context. /cache is kept.
install -d -o 1000 -g 1000 "$folder/cache"
container=$("${buildah[@]}" from --arch arm64 --pull-never localhost/edgekv)
"${buildah[@]}" run --env "EDGEKV_API_KEY=$key" --env KV=dense --env CTX=256 --env "PORT=$port" --env QEMU_CPU=cortex-a76 \
    --volume "$folder/cache:/cache" "$container" edgekv-start >"$folder/serve.log" 2>&1 &
server=$!
trap 'kill "$server" 2>"$folder/kill.log" || true; "${buildah[@]}" rm "$container" >"$folder/rm.log" 2>&1 || true' EXIT

url=http://127.0.0.1:$port
for ((i = 0; i < 900; i++)); do
    ! curl -fsS "$url/health" >"$folder/health.json" 2>"$folder/curl.log" || break
    kill -0 "$server" 2>"$folder/kill.log" || die "the server ended: $(tail -n 3 "$folder/serve.log")"
    sleep 2
done
"${buildah[@]}" run "$container" uname -m
cat "$folder/health.json"
curl -fsS "$url/v1/completions" -H "Authorization: Bearer $key" -H 'Content-Type: application/json' \
    -d '{"model": "demo", "prompt": "It was", "max_tokens": 8, "temperature": 0}'
echo
