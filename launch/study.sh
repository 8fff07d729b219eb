# shellcheck shell=bash
# Functions for the scripts that make a table of the paper (enwik8, tatoeba). They work in the folder OUT, so that no path
# of a machine is written into results.

fail() { # message
    echo "error: $*" >&2
    exit 2
}

enter_out() { # OUT: goes there; t2r is that of this clone, and so is Python, if it has one and PYTHON names no other
    # shellcheck source=launch/environment.sh
    . "$(dirname "$0")/environment.sh"
    use_clone
    out=$1 results=${RESULTS:-$root/results/$(basename "$0")}
    make_folder "$out" OUT
    make_folder "$results" RESULTS
    results=$(cd "$results" && pwd)
    cd "$out" || exit
}

make_folder() { # folder, what it is
    [[ ! -e $1 || -d $1 ]] || fail "$1: it is a file, not a folder; choose another $2"
    { mkdir -p "$1" && [[ -w $1 ]]; } 2>/dev/null || fail "$1: it cannot be made or written; choose another $2"
}

absolute() { # prints the absolute path of a file, which must exist
    [[ -f $1 && -r $1 ]] || fail "there is no file $1 that can be read"
    echo "$(cd "$(dirname "$1")" && pwd)/$(basename "$1")"
}

# prepare TEXT SOURCE COMMAND...: makes TEXT by `COMMAND SOURCE TEXT`, once. What SOURCE was is kept in TEXT.source, so that
# another one is refused, and not ignored.
prepare() {
    local text=$1 source=$2 sum before name
    prepared=$text
    shift 2
    sum=$(cksum <"$source")
    if [[ -s $text.source ]]; then
        { read -r before && read -r name; } <"$text.source" || true
        [[ $before == "$sum" ]] || fail "$out: it was made from $name; give that file, or another OUT"
        [[ ! -s $text ]] || return 0
    fi
    "$@" "$source" "$text.partial" || { rm -f "$text.partial"; exit 2; }
    if [[ -s $text ]] && ! cmp -s "$text" "$text.partial"; then # of an OUT that has no TEXT.source
        rm "$text.partial"
        fail "$out: it was made from another file; give that file, or another OUT"
    fi
    mv "$text.partial" "$text"
    printf '%s\n' "$sum" "$(basename "$source")" >"$text.source"
}

# study FLAGS...: `t2r study`. Rows that fail do not stop the script, but make it end with status 2; flags that are refused,
# and an interruption, do.
failed=0
study() {
    local status=0
    touch study.begun
    "$python" -m t2r study --output=study --scale="${SCALE:-1}" --jobs="${JOBS:-6}" "$@" || status=$?
    ((status == 0 || status == 2)) || exit "$status"
    ((status == 0)) || failed=2
    if ((failed)) && [[ ! study/study.json -nt study.begun ]]; then # refused: it writes its table even if all rows fail
        [[ -e study/study.json ]] || rm -f "$prepared" "$prepared.source" # the text may be what was refused
        rm study.begun
        exit 2
    fi
    rm study.begun
}

check_rows() { # CONFIG ROWS: refuses a config without a table of rows, and all rows that it does not have
    "$python" - "$@" <<'END'
import sys

from t2r.errors import InputError, raise_all, unknown
from t2r.workflow.study import SWAPPED, rows_of

try:
    known, wanted = rows_of(sys.argv[1]), dict.fromkeys(filter(None, sys.argv[2].split(",")))
    others = [row for row in wanted if row.removesuffix(SWAPPED) not in known]
    raise_all("rows:", [unknown("row", row, known) for row in others])
except InputError as error:
    sys.exit(f"error: {error}")
END
}

publish() { # copies tables and figures to RESULTS, and writes the page that shows them if that is in this clone
    local why=""
    [[ -s study/study.json ]] || return 0
    if [[ -s $results/study.json ]]; then
        why=$(loses "$results/study.json" 2>/dev/null) || why="its study.json cannot be read"
        ((failed == 0)) || why="something failed"
    fi
    if [[ -n $why ]]; then
        echo "$results stays as it is: $why. The new table is $out/study/study.md; RESULTS=FOLDER copies it elsewhere" >&2
        return
    fi
    cp study/study.json study/study.md "$results/"
    if [[ -s analysis/analysis.json ]]; then
        mkdir -p "$results/analysis"
        rm -f "$results"/analysis/study.{json,md} # of an analysis of other models than the table's
        cp analysis/analysis.json analysis/*.png "$results/analysis/"
    fi
    if [[ $results == "$root/results/"* ]]; then "$python" "$root/launch/results_page"; fi
}

loses() { # study.json: prints what would be lost if the new one replaced it; nothing if nothing would
    "$python" - "$1" study/study.json <<'END'
import json, sys

old, new = (json.load(open(path)) for path in sys.argv[1:])
rows, kept = ([f"{row['row']} (seed {row['seed']})" for row in table["rows"]] for table in (old, new))
lost = [row for row in rows if row not in kept]
if old["config"] != new["config"]:
    print(f"it has the table of {old['config']}, the new one is of {new['config']}")
elif lost:
    print("the new table lacks " + ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else ""))
elif new["scale"] < old["scale"]:
    print(f"the new table was made with SCALE={new['scale']:g}, that one with {old['scale']:g}")
END
}
