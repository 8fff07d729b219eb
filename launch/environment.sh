# Sourced by the scripts beside it: makes .venv with what the given requirement files ask for, once.
# Safe to run again and after an interruption: the stamp that ends it is written last.

fits() { # a command that is one of the Pythons t2r runs on
  command -v "$1" >/dev/null && "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then # asked for: this one or none
    fits "$PYTHON" && command -v "$PYTHON" && return
    echo "error: PYTHON=$PYTHON is no Python 3.11, 3.12 or 3.13; correct or unset it" >&2
    return 1
  fi
  for candidate in python3 python3.13 python3.12 python3.11; do
    fits "$candidate" && command -v "$candidate" && return
  done
  echo "error: t2r needs Python 3.11, 3.12 or 3.13; none was found. Install one, or set PYTHON to its path." >&2
  return 1
}

make_environment() { # requirement files...
  local python=.venv/bin/python stamp wanted
  if [ -n "${PYTHON:-}" ] || ! .venv/bin/python -c 'import pip' 2>/dev/null; then
    python=$(find_python) || return 1
  fi
  wanted=$( ("$python" -V; cat "$@") | sha256sum | cut -c1-16)
  stamp=.venv/ready-$wanted
  [ -e "$stamp" ] && return
  # Another script's packages are no reason to start over; another Python or a half-made environment is.
  if ! .venv/bin/python -c 'import pip' 2>/dev/null || [ "$("$python" -V)" != "$(.venv/bin/python -V)" ]; then
    rm -rf .venv
    if ! "$python" -m venv .venv; then
      rm -rf .venv
      echo "error: $python cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv" >&2
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
