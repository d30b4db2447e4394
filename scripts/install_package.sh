#!/usr/bin/env bash
# Builds the wheel (scripts/build_wheel.sh: dist/trunkline-*.whl) and installs it into .venv. Does nothing when the
# installed one was built from the sources as they are.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# One at a time: two would take the wheel from under each other.
exec 9>.venv/lock-trunkline
flock 9

stamp=.venv/stamp-trunkline
sources() {
  find pyproject.toml CMakeLists.txt LICENSE licenses cmake include src python scripts/build_wheel.sh -type f \
    ! -name '*_test.cpp' ! -path 'python/tests/*' ! -path '*/__pycache__/*' -print0 | LC_ALL=C sort -z
}
state=$(sources | xargs -0 sha256sum | sha256sum)
# Imported from build/, not from the root, where a folder might stand in for the installed package.
mkdir -p build
imports() { (cd build && ../.venv/bin/python -c 'import trunkline'); }
if [[ $state == "$(cat "$stamp" 2>/dev/null)" ]] && compgen -G 'dist/trunkline-*.whl' >/dev/null && imports 2>/dev/null; then
  exit 0
fi

log=build/wheel.log
: >"$log"
quietly() { # quietly COMMAND...: its output matters only when it fails
  if ! "$@" >>"$log" 2>&1; then
    cat "$log" >&2
    echo "install_package: '$*' failed; its output is above and in $log" >&2
    exit 1
  fi
}
echo "building the Python package (minutes the first time)"
# First of all the old one goes: the type stubs are made by importing the new extension module, and an installed
# package of the same name would be found beside it.
rm -f "$stamp"
quietly .venv/bin/python -m pip uninstall --yes --disable-pip-version-check trunkline
quietly scripts/build_wheel.sh
quietly .venv/bin/python -m pip install --no-deps --disable-pip-version-check dist/trunkline-*.whl
imports
echo "$state" >"$stamp"
echo "installed $(basename dist/trunkline-*.whl) into .venv"
