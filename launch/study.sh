# shellcheck shell=bash
# Functions for the scripts that make a table of the paper (enwik8, tatoeba). They work in the folder OUT, so that no path
# of a machine is written into results.

enter_out() { # OUT: goes there; t2r is that of this clone
    python=$(command -v "${PYTHON:-python}") || { echo "error: there is no ${PYTHON:-python}; set PYTHON" >&2; exit 2; }
    [[ $python == /* ]] || python=$PWD/$python
    root=$(cd "$(dirname "$0")/.." && pwd)
    results=${RESULTS:-$root/results/$(basename "$0")}
    mkdir -p "$1" "$results"
    results=$(cd "$results" && pwd)
    export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
    cd "$1"
}

absolute() { # prints the absolute path of a file, which must exist
    [[ -f $1 ]] || { echo "error: there is no file $1" >&2; exit 2; }
    echo "$(cd "$(dirname "$1")" && pwd)/$(basename "$1")"
}

# study FLAGS...: `t2r study`. Rows that fail do not stop the script, but make it end with status 2; an interruption does.
failed=0
study() {
    local status=0
    "$python" -m t2r study --output=study --scale="${SCALE:-1}" --jobs="${JOBS:-6}" "$@" || status=$?
    ((status == 0 || status == 2)) || exit "$status"
    ((status == 0)) || failed=2
}

publish() { # copies the tables to RESULTS, and writes the page that shows them if that is in this clone
    cp study/study.json study/study.md "$results/"
    if [[ $results == "$root/results/"* ]]; then "$python" "$root/launch/results_page"; fi
}
