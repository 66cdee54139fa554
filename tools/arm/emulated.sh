#!/usr/bin/env bash
# Runs a command in an emulated Cortex-A76 (Raspberry Pi 5) over this checkout, on any x86-64 Linux.
#
#   tools/arm/emulated.sh                            the whole test suite (hours)
#   tools/arm/emulated.sh pytest tests/test_kernels_planes.py
#   tools/arm/emulated.sh python tools/arm/smoke.py  what .ci/run does
#   tools/arm/emulated.sh build                      only fetches what is needed
#
# Needs curl, dpkg-deb, xz, pip, a package index and Debian's mirror; nothing is installed into the system. Debian's
# arm64 Python, aarch64 wheels and qemu are unpacked into EDGEKV_ARM_ROOT (default ~/.cache/edgekv/arm-*), once.
# EDGEKV_ARM_CPU is the processor (default cortex-a76; cortex-a57 has no dot product); NUMBA_CPU_NAME that for
# which kernels are compiled, if another.
set -euo pipefail

cpu=${EDGEKV_ARM_CPU:-cortex-a76}
tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
mirror=${EDGEKV_DEBIAN_MIRROR:-http://deb.debian.org/debian}
suite=bookworm # has Python 3.11
packages=(libc6 libgcc-s1 libstdc++6 libgomp1 zlib1g libexpat1 libssl3 libffi8 libsqlite3-0 libbz2-1.0 liblzma5 libuuid1
    libreadline8 libtinfo6 libncursesw6 libdb5.3 libnsl2 libtirpc3 libcrypt1 libpython3.11-minimal
    libpython3.11-stdlib python3.11-minimal)
wheels=(numpy numba llvmlite sentencepiece tokenizers safetensors psutil ml_dtypes threadpoolctl
    tqdm msgspec pytest hypothesis jinja2 gguf)
# Another list is another folder: what was unpacked for an earlier one lacks what is new.
list=$(printf '%s ' "${packages[@]}" "${wheels[@]}" | cksum | cut -d ' ' -f 1)
root=${EDGEKV_ARM_ROOT:-${XDG_CACHE_HOME:-$HOME/.cache}/edgekv/arm-$list}

die() {
    printf 'tools/arm/emulated.sh: %s\n' "$1" >&2
    exit 1
}

fetch() { # ARCHITECTURE FOLDER PACKAGE...: unpacks packages of Debian into the folder
    local architecture=$1 folder=$2 list=$root.partial/debs/Packages-$1 name path
    mkdir -p "$folder" "$root.partial/debs"
    curl -fsSL "$mirror/dists/$suite/main/binary-$architecture/Packages.xz" | xz -d >"$list" ||
        die "no list of $architecture packages at $mirror; set EDGEKV_DEBIAN_MIRROR"
    for name in "${@:3}"; do
        path=$(awk -v name="$name" '$1 == "Package:" {it = $2 == name} it && $1 == "Filename:" {print $2; exit}' "$list")
        [[ -n $path ]] || die "$mirror has no $architecture package $name"
        curl -fsSL -o "$root.partial/debs/$name.deb" "$mirror/$path" || die "$mirror/$path cannot be fetched"
        dpkg-deb -x "$root.partial/debs/$name.deb" "$folder"
    done
}

build() {
    local wheel
    for tool in curl dpkg-deb xz python3; do
        command -v "$tool" >/dev/null || die "$tool is missing; on Debian: apt-get install curl dpkg xz-utils python3-pip"
    done
    rm -rf "$root.partial"
    fetch arm64 "$root.partial" "${packages[@]}"
    fetch amd64 "$root.partial/host" qemu-user-static
    find "$root.partial/host" -type f ! -name qemu-aarch64-static -delete
    python3 -m pip download -q --only-binary=:all: --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 \
        --platform manylinux2014_aarch64 --python-version 3.11 --dest "$root.partial/debs/wheels" "${wheels[@]}" ||
        die 'pip cannot download the aarch64 wheels'
    for wheel in "$root.partial/debs/wheels"/*.whl; do
        python3 -m zipfile -e "$wheel" "$root.partial/site"
    done
    rm -rf "$root.partial/debs"
    mv "$root.partial" "$root"
}

[[ -d $root ]] || build
[[ ${1:-} != build ]] || exit 0

qemu=$root/host/usr/bin/qemu-aarch64-static
[[ -x $qemu ]] || qemu=$(command -v qemu-aarch64-static) || die "$qemu is missing; remove $root to build it again"
# sys.executable of the emulated Python: tests start more of them by this name.
cat >"$root/python.$$" <<PYTHON
#!/bin/sh
exec "$qemu" -cpu \${EDGEKV_ARM_CPU:-cortex-a76} -L "$root" -0 "$root/python" "$root/usr/bin/python3.11" "\$@"
PYTHON
chmod +x "$root/python.$$"
mv "$root/python.$$" "$root/python"

# qemu shows programs the host's /proc/cpuinfo unless the root has one.
case $cpu in
cortex-a57 | cortex-a72) part=0xd07 features='fp asimd aes crc32' ;;
*) part=0xd0b features='fp asimd aes crc32 atomics fphp asimdhp asimddp' ;;
esac
mkdir -p "$root/proc"
for ((i = 0; i < $(nproc --all); i++)); do
    printf 'processor\t: %d\nFeatures\t: %s\nCPU implementer\t: 0x41\n' "$i" "$features"
    printf 'CPU architecture: 8\nCPU variant\t: 0x1\nCPU part\t: %s\nCPU revision\t: 0\n\n' "$part"
done >"$root/proc/cpuinfo.$$"
mv "$root/proc/cpuinfo.$$" "$root/proc/cpuinfo"

# The checkout as an installed distribution: importlib.metadata asks for its version, and for the papers' schemes.
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$tree/pyproject.toml")
mkdir -p "$root/site/edgekv.dist-info"
printf 'Metadata-Version: 2.1\nName: edgekv\nVersion: %s\n' "$version" >"$root/site/edgekv.dist-info/METADATA"
sed -n '/^\[project.entry-points."edgekv.schemes"\]/,/^$/{s/^\[.*/[edgekv.schemes]/;s/"//g;p}' "$tree/pyproject.toml" \
    >"$root/site/edgekv.dist-info/entry_points.txt"

export PYTHONPATH=$tree:$root/site PYTHONHOME=$root/usr PYTHONDONTWRITEBYTECODE=1 EDGEKV_ARM_CPU=$cpu
# Emulated processors have no name that LLVM knows.
export NUMBA_CPU_NAME=${NUMBA_CPU_NAME:-$cpu} NUMBA_CACHE_DIR=${NUMBA_CACHE_DIR:-$root.numba-$cpu}
cd "$tree"
case ${1:-pytest} in
pytest) exec "$root/python" -m pytest -q -p no:cacheprovider "${@:2}" ;;
python) exec "$root/python" "${@:2}" ;;
*) die "unknown: $1 (nothing, build, pytest ARGUMENTS or python ARGUMENTS)" ;;
esac
