#!/usr/bin/env bash
# Builds the wheel (dist/trunkline-*.whl: auditwheel puts in what the machine may lack) and installs it into .venv.
# Does nothing when the installed one was built from the sources as they are.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stamp=.venv/stamp-trunkline
sources() {
  find pyproject.toml CMakeLists.txt cmake include src python -type f \
    ! -name '*_test.cpp' ! -path 'python/tests/*' ! -path '*/__pycache__/*' -print0 | LC_ALL=C sort -z
}
state=$(sources | xargs -0 sha256sum | sha256sum)
if [[ $state == "$(cat "$stamp" 2>/dev/null)" ]] && .venv/bin/python -c 'import trunkline' 2>/dev/null; then
  exit 0
fi

log=build/wheel.log
raw=build/wheel
mkdir -p build dist
rm -rf "$raw" dist/trunkline-*.whl
quietly() { # quietly WHAT COMMAND...: the output matters only when the command fails
  local what=$1
  shift
  if ! "$@" >>"$log" 2>&1; then
    cat "$log" >&2
    echo "install_package: $what failed; its output is above and in $log" >&2
    exit 1
  fi
}
: >"$log"
echo "building the Python package (a minute or two the first time)"
export PATH="$PWD/.venv/bin:$PATH"
if command -v ccache >/dev/null; then export CMAKE_CXX_COMPILER_LAUNCHER=ccache; fi
quietly "building the wheel" python -m pip wheel --no-build-isolation --no-deps --disable-pip-version-check -w "$raw" .
quietly "auditwheel repair" python -m auditwheel repair -w dist "$raw"/trunkline-*.whl
quietly "installing the wheel" python -m pip install --no-deps --force-reinstall --disable-pip-version-check \
  dist/trunkline-*.whl
# Not from the root, where a folder might stand in for the installed package.
(cd build && ../.venv/bin/python -c 'import trunkline')
echo "$state" >"$stamp"
echo "installed $(basename dist/trunkline-*.whl) into .venv"
