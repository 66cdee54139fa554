#!/usr/bin/env bash
# Runs a command in an emulated Cortex-A76 (Raspberry Pi 5) over this checkout, on an x86-64 Debian or Ubuntu.
#
#   tools/arm_emulated.sh                            the whole test suite (an hour or more)
#   tools/arm_emulated.sh pytest tests/test_kernels_signs.py
#   tools/arm_emulated.sh python tools/arm_smoke.py  what .ci/run does
#
# Needs apt-get with its package lists, dpkg-deb, pip and a package index; nothing is installed into the system.
# arm64 packages of Debian's Python and aarch64 wheels are unpacked into EDGEKV_ARM_ROOT (default
# ~/.cache/edgekv/arm), once; CPU and PYTHON below may be set in the environment.
set -euo pipefail

cpu=${EDGEKV_ARM_CPU:-cortex-a76}
root=${EDGEKV_ARM_ROOT:-${XDG_CACHE_HOME:-$HOME/.cache}/edgekv/arm}
tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# onnxruntime 1.31 crashes at import under emulation.
wheels='numpy numba llvmlite onnxruntime<1.28 onnx sentencepiece tokenizers safetensors psutil ml_dtypes
        threadpoolctl tqdm tiktoken regex pytest hypothesis jinja2 gguf'

die() {
    printf 'tools/arm_emulated.sh: %s\n' "$1" >&2
    exit 1
}

fetch_packages() { # FOLDER PACKAGE...: arm64 .deb files of Debian, from the pool that apt knows
    local folder=$1 mirror list
    mkdir -p "$folder"
    mirror=${EDGEKV_DEBIAN_MIRROR:-http://deb.debian.org/debian}
    suite=$(. /etc/os-release && echo "${VERSION_CODENAME:-bookworm}")
    list=$folder/Packages
    [[ -f $list ]] || curl -fsSL "$mirror/dists/$suite/main/binary-arm64/Packages.xz" | xz -d >"$list" ||
        die "no package list of arm64 from $mirror; set EDGEKV_DEBIAN_MIRROR"
    shift
    for name in "$@"; do
        path=$(awk -v name="$name" '$1 == "Package:" {match_ = $2 == name} match_ && $1 == "Filename:" {print $2; exit}' "$list")
        [[ -n $path ]] || die "Debian has no arm64 package $name"
        curl -fsSL -o "$folder/$name.deb" "$mirror/$path"
        dpkg-deb -x "$folder/$name.deb" "$root.partial"
    done
}

build_root() {
    rm -rf "$root.partial"
    mkdir -p "$root.partial"
    fetch_packages "$root.partial.debs" libc6 libgcc-s1 libstdc++6 libgomp1 zlib1g libexpat1 libssl3 libffi8 libsqlite3-0 \
        libbz2-1.0 liblzma5 libuuid1 libreadline8 libtinfo6 libncursesw6 libdb5.3 libnsl2 libtirpc3 libcrypt1 \
        libpython3.11-minimal libpython3.11-stdlib python3.11-minimal
    if ! command -v qemu-aarch64-static >/dev/null; then
        (cd "$root.partial.debs" && apt-get download -q qemu-user-static >/dev/null && dpkg-deb -x qemu-user-static_*.deb qemu)
        mkdir -p "$root.partial/host"
        cp "$root.partial.debs/qemu/usr/bin/qemu-aarch64-static" "$root.partial/host/"
    fi
    # shellcheck disable=SC2086
    python3 -m pip download -q --only-binary=:all: --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 \
        --platform manylinux2014_aarch64 --python-version 3.11 --dest "$root.partial.debs/wheels" $wheels
    mkdir -p "$root.partial/site"
    for wheel in "$root.partial.debs"/wheels/*.whl; do
        python3 -m zipfile -e "$wheel" "$root.partial/site"
    done
    rm -rf "$root.partial.debs"
    mv "$root.partial" "$root"
}

[[ -d $root ]] || build_root
qemu=$(command -v qemu-aarch64-static || echo "$root/host/qemu-aarch64-static")
python=("$qemu" -cpu "$cpu" -L "$root" "$root/usr/bin/python3.11")

# The checkout as an installed distribution: importlib.metadata asks for its version.
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$tree/pyproject.toml")
mkdir -p "$root/site/edgekv.dist-info"
printf 'Metadata-Version: 2.1\nName: edgekv\nVersion: %s\n' "$version" >"$root/site/edgekv.dist-info/METADATA"

export PYTHONPATH=$tree:$root/site PYTHONHOME=$root/usr PYTHONDONTWRITEBYTECODE=1
# Emulated processors have no name that LLVM knows.
export NUMBA_CPU_NAME=$cpu NUMBA_CACHE_DIR=${NUMBA_CACHE_DIR:-$root.numba-$cpu} QEMU_LD_PREFIX=$root
cd "$tree"
case ${1:-suite} in
suite) exec "${python[@]}" -m pytest -q -p no:cacheprovider ;;
pytest) exec "${python[@]}" -m pytest -q -p no:cacheprovider "${@:2}" ;;
python) exec "${python[@]}" "${@:2}" ;;
*) die "unknown: $1 (nothing, pytest ARGUMENTS or python ARGUMENTS)" ;;
esac
