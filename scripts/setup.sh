#!/usr/bin/env bash
# Installs what the project's commands need, on Debian 12 and Ubuntu 24.04: distribution packages (as root; otherwise
# it prints the command to run) and pinned Python packages in .venv. What is there already is left alone, so a second
# call costs well under a second.
#
#   scripts/setup.sh [build] [package] [test] [lint] [docs] [demo] [bench]
#
#   build     compile the library and the command line
#   package   build and run the Python package (includes build)
#   test      make test (includes package)
#   lint      make lint (includes docs)
#   docs      make docs (includes package)
#   demo      make demo (includes package)
#   bench     make bench (includes package)
#
# PYTHON names the interpreter that .venv is made from (default: python3; at least 3.11).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  sed -n '2,/^set -/{/^#/!d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
  exit "$1"
}

declare -A wanted=()
(($#)) || set -- build package test lint docs demo bench
for group in "$@"; do
  case $group in
    build) ;;
    package | test) wanted[package]=1 ;;
    docs | lint) wanted[package]=1 wanted[docs]=1 wanted[models]=1 ;;
    demo | bench) wanted[package]=1 wanted[models]=1 ;;
    -h | --help) usage 0 ;;
    *)
      echo "setup: unknown group '$group'" >&2
      usage 2
      ;;
  esac
  wanted[$group]=1
done

python=${PYTHON:-python3}

# ---------------------------------------------------------------------------------------------- distribution packages

installed() { [[ $(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null) == installed ]]; }

at_least() { [[ $(printf '%s\n' "$1" "$2" | sort -V | head -n 1) == "$1" ]]; }

missing=()
need() { # need PACKAGE...: those that dpkg does not know as installed
  local package
  for package in "$@"; do installed "$package" || missing+=("$package"); done
}
need_command() { # need_command COMMAND PACKAGE: whoever provides the command, a cmake from pip too
  command -v "$1" >/dev/null || missing+=("$2")
}

collect_missing() {
  missing=()
  need_command g++ g++
  need_command make make
  need_command ninja ninja-build
  need_command pkg-config pkg-config
  at_least 3.25 "$(cmake --version 2>/dev/null | awk 'NR == 1 { print $3 }')" || missing+=(cmake)
  need liburing-dev libisal-dev libfmt-dev libcli11-dev nlohmann-json3-dev
  if [[ ${wanted[package]:-} ]]; then
    # Debian splits the interpreter; others (pyenv, conda) come whole.
    command -v "$python" >/dev/null || missing+=(python3)
    "$python" -c 'import venv, ensurepip' 2>/dev/null || missing+=(python3-venv)
    "$python" -c 'import os, sysconfig; open(os.path.join(sysconfig.get_path("include"), "Python.h"))' \
      2>/dev/null || missing+=(python3-dev)
    need_command fio fio
  fi
  if [[ ${wanted[test]:-} ]]; then
    need libgtest-dev ccache clang-19 libclang-rt-19-dev
    # Filesystems that are cut off: python/tests/crash_rounds.py.
    need_command mkfs.ext4 e2fsprogs
    need_command mkfs.xfs xfsprogs
    # And others that behave differently: python/tests/filesystem_checks.py.
    need_command mkfs.btrfs btrfs-progs
    need_command mkfs.vfat dosfstools
    need_command fuse2fs fuse2fs
    need_command mount mount
    need_command unshare util-linux
    # Emulated ranks under mpirun: python/tests/test_workload_mpi.py.
    need openmpi-bin libopenmpi-dev
  fi
  if [[ ${wanted[lint]:-} ]]; then
    need libgtest-dev clang-tidy-19 clang-format-19 shellcheck
  fi
  if [[ ${wanted[bench]:-} ]]; then
    need_command mkfs.ext4 e2fsprogs
    need_command losetup mount
    need_command mkfs.btrfs btrfs-progs
  fi
}

install_missing() {
  local try
  export DEBIAN_FRONTEND=noninteractive
  echo "setup: installing ${missing[*]}"
  for try in 1 2 3; do
    if apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null; then
      return
    fi
    echo "setup: apt-get failed (try $try of 3)" >&2
    sleep $((try * 5))
  done
  echo "setup: could not install ${missing[*]}; see the messages of apt-get above" >&2
  exit 1
}

if command -v dpkg-query >/dev/null; then
  collect_missing
  if ((${#missing[@]})); then
    if ((EUID == 0)); then
      install_missing
    else
      echo "setup: these packages are missing, and only root can install them. Run" >&2
      echo "  sudo sh -c 'apt-get update && apt-get install -y --no-install-recommends ${missing[*]}'" >&2
      echo "and repeat the command." >&2
      exit 1
    fi
  fi
elif [[ -z ${TRUNKLINE_SKIP_PACKAGES:-} ]]; then
  echo "setup: neither Debian nor Ubuntu. Install the counterparts of the packages that scripts/setup.sh names" >&2
  echo "and repeat the command with TRUNKLINE_SKIP_PACKAGES=1." >&2
  exit 1
fi

# --------------------------------------------------------------------------------------------------- Python packages

[[ ${wanted[package]:-} ]] || exit 0

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "setup: $python is $("$python" --version 2>&1), the pinned packages need 3.11 or later; name another one with PYTHON=..." >&2
  exit 1
fi
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
if [[ ${PYTHON:-} && $(version_of .venv/bin/python) && $(version_of .venv/bin/python) != "$(version_of "$python")" ]]; then
  echo "setup: .venv has Python $(version_of .venv/bin/python), but PYTHON=$PYTHON is $(version_of "$python");" >&2
  echo "remove .venv to make it anew: rm -rf .venv" >&2
  exit 1
fi
if ! .venv/bin/python -c '' 2>/dev/null; then
  echo "setup: making .venv with $("$python" --version)"
  rm -rf .venv
  "$python" -m venv .venv
fi

# A requirement file is installed once for each of its contents and each content of the constraints.
stamp_of() { cat requirements/constraints.txt "requirements/$1.txt" | sha256sum | cut -d ' ' -f 1; }
stale() { [[ $(cat ".venv/stamp-$1" 2>/dev/null) != $(stamp_of "$1") ]]; }
pip_install() { # pip_install NAME...: all requirement files in one resolution
  local name arguments=()
  for name in "$@"; do arguments+=(-r "requirements/$name.txt"); done
  echo "setup: installing the Python packages of ${*/#/requirements/}"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --retries 5 -c requirements/constraints.txt \
    "${arguments[@]}"
  for name in "$@"; do stamp_of "$name" >".venv/stamp-$name"; done
}

# torch first and alone: with it in place no other package makes pip choose one.
if stale torch; then pip_install torch; fi
requirements=()
for name in package test lint docs models; do
  if [[ ${wanted[$name]:-} ]] && stale "$name"; then requirements+=("$name"); fi
done
if ((${#requirements[@]})); then pip_install "${requirements[@]}"; fi

if [[ ${wanted[test]:-} ]] && stale nvidia; then
  echo "setup: installing NVIDIA's headers of requirements/nvidia"
  rm -rf .venv/nvidia
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --retries 5 --no-deps --target .venv/nvidia \
    -r requirements/nvidia.txt
  stamp_of nvidia >.venv/stamp-nvidia
fi
