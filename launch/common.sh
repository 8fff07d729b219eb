# Functions for the scripts that start runs (local, slurm, gke, tpu): flags, --dry_run, and the command of a run.

usage() { # prints the comment at the top of the script
  sed -n '2,/^[^#]/{/^#/!d;s/^# \{0,1\}//;p}' "$0"
}

fail() { # message
  echo "error: $*" >&2
  exit 2
}

# Stores --name=value in flag_name, --name as 1, and everything after -- in COMMAND. The first argument lists the flags:
#   parse_flags "name zone dry_run" "$@"
parse_flags() {
  local known=" $1 " argument name value unknown=()
  shift
  COMMAND=()
  while [ $# -gt 0 ]; do
    argument=$1
    shift
    case $argument in
      --) COMMAND=("$@"); break ;;
      --help | -h) usage; exit 0 ;;
      --*) name=${argument#--}; name=${name%%=*}; value=1; [[ $argument == *=* ]] && value=${argument#*=}
        if [[ $known == *" $name "* ]]; then printf -v "flag_$name" %s "$value"; else unknown+=("$argument"); fi ;;
      *) unknown+=("$argument") ;;
    esac
  done
  [ ${#unknown[@]} -eq 0 ] || fail "unknown: ${unknown[*]}. Write flags as --name=value; the flags are:${known% }; the t2r command follows --"
}

flag() { # name [default]: prints the value of a flag; without a default the flag is required
  local variable=flag_$1
  if [ -n "${!variable:-}" ]; then
    printf %s "${!variable}"
  elif [ $# -gt 1 ]; then
    printf %s "$2"
  else
    echo "error: --$1=... is missing; see --help" >&2
    return 2
  fi
}

dry() { [ -n "${flag_dry_run:-}" ]; }

run() { # runs a command; with --dry_run only prints it
  if dry; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

need() { # program, hint: fails if the program is not installed, except with --dry_run
  dry || command -v "$1" >/dev/null || fail "$1 is not installed on this machine: $2"
}

need_command() {
  [ ${#COMMAND[@]} -gt 0 ] || fail "what to run is missing: end the line with -- train --config=... --workdir=..."
}

quoted() { # prints its arguments quoted for another shell
  local words
  printf -v words '%q ' "$@"
  printf %s "${words% }"
}
