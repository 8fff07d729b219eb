# shellcheck shell=bash
# make_environment: creates .venv and installs requirement files, unless a stamp file says that this was done.
# Safe to run again and after an interruption: the stamp is written last.
# make_overlay: an environment beside it, for packages that need other versions than .venv has.
# use_clone: for scripts that run in any folder, with the Python and the t2r of this clone.

fits() { # whether a command is a supported Python
  command -v "$1" >/dev/null && "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then # chosen by the user: no other is tried
    fits "$PYTHON" && command -v "$PYTHON" && return
    echo "error: PYTHON=$PYTHON is not Python 3.11, 3.12 or 3.13; correct or unset it" >&2
    return 1
  fi
  for candidate in python3 python3.13 python3.12 python3.11; do
    fits "$candidate" && command -v "$candidate" && return
  done
  echo "error: t2r needs Python 3.11, 3.12 or 3.13; none was found. Install one, or set PYTHON to its path." >&2
  return 1
}

use_clone() { # sets root, the clone's folder; python: PYTHON, or else that of .venv, or else of PATH; and PYTHONPATH
  root=$(cd "$(dirname "$0")/.." && pwd)
  local wanted=python
  [ ! -x "$root/.venv/bin/python" ] || wanted=$root/.venv/bin/python
  wanted=${PYTHON:-$wanted}
  python=$(command -v "$wanted") || { echo "error: there is no $wanted; set PYTHON" >&2; exit 2; }
  case $python in /*) ;; *) python=$PWD/$python ;; esac
  export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
}

make_environment() { # requirement files...
  local python=.venv/bin/python stamp wanted
  if [ -n "${PYTHON:-}" ] || ! .venv/bin/python -c 'import pip' 2>/dev/null; then
    python=$(find_python) || return 1
  fi
  wanted=$( ("$python" -V; cat "$@") | sha256sum | cut -c1-16)
  stamp=.venv/ready-$wanted
  [ -e "$stamp" ] && return
  # Other packages are added to an existing environment; a broken one, or one of another Python version, is recreated.
  if ! .venv/bin/python -c 'import pip' 2>/dev/null || [ "$("$python" -V)" != "$(.venv/bin/python -V)" ]; then
    rm -rf .venv
    if ! "$python" -m venv .venv; then
      rm -rf .venv
      echo "error: $python cannot create virtual environments. On Debian and Ubuntu: apt install python3-venv" >&2
      return 1
    fi
  fi
  echo "installing packages into .venv (a minute or two, once)" >&2
  local file arguments=()
  for file in "$@"; do arguments+=(-r "$file"); done
  .venv/bin/python -m pip install -qq --disable-pip-version-check "${arguments[@]}" || {
    echo "error: pip could not install the packages above; check the network and run this again" >&2
    return 1
  }
  touch "$stamp"
}

make_overlay() { # folder, packages...: an environment with these packages before those of .venv, which stays as it is
  local folder=$1 packages
  shift
  rm -rf "$folder"
  .venv/bin/python -m venv "$folder" || return 1
  packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$packages/below.pth"
  "$folder/bin/python" -m pip install -qq --disable-pip-version-check "$@"
}
