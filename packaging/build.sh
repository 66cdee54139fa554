#!/bin/sh
# Builds the sdist, and from it the wheel, into dist/; checks their metadata, and runs the wheel in a fresh environment.
#
# Needs a Python with venv (python3, or another named by PYTHON) and a package index for build, twine and what edgekv
# depends on. Publishing is left to whoever has the name: twine upload dist/*
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m venv "$work/tools"
"$work/tools/bin/python" -m pip install -q build twine
rm -rf dist
"$work/tools/bin/python" -m build --outdir dist .
"$work/tools/bin/python" -m twine check --strict dist/*

"$python" -m venv "$work/fresh"
"$work/fresh/bin/python" -m pip install -q dist/*.whl
wheel=$(echo dist/*.whl)
cd "$work" # so that the package of the checkout is not the one that runs
version=$(fresh/bin/edgekv --version)
case $wheel in
*"-${version#edgekv }-"*) ;;
*) echo "packaging/build.sh: $wheel says it is $version" >&2 && exit 1 ;;
esac
fresh/bin/edgekv run --prompt "It was a dark night" --max-new-tokens 8
echo "$wheel is $version, and runs"
