# Sourced by the scripts that start runs elsewhere: flags, --dry_run, and the command of a run.

usage() { # the comment at the head of the script
  sed -n '2,/^[^#]/{/^#/!d;s/^# \{0,1\}//;p}' "$0"
}

fail() { # message
  echo "error: $*" >&2
  exit 2
}

# Reads --name=value into flag_name, bare --name as 1, and what follows -- into COMMAND. The known names are given first:
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
  [ ${#unknown[@]} -eq 0 ] || fail "unknown: ${unknown[*]}. Flags are --name=value, one of:${known% }; the run's command follows --"
}

flag() { # name [default]: its value; without a default it must be there
  local variable=flag_$1
  if [ -n "${!variable:-}" ]; then
    printf %s "${!variable}"
  elif [ $# -gt 1 ]; then
    printf %s "$2"
  else
    echo "error: --$1=... is missing; --help says more" >&2
    return 2
  fi
}

dry() { [ -n "${flag_dry_run:-}" ]; }

run() { # a command, which --dry_run only prints
  if dry; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

need() { # a program that must be there, unless nothing is run
  dry || command -v "$1" >/dev/null || fail "no $1 on this machine: $2"
}

need_command() {
  [ ${#COMMAND[@]} -gt 0 ] || fail "what to run is missing: end with -- train --config=... --workdir=..."
}

quoted() { # words, so that another shell reads them as they are
  local words
  printf -v words '%q ' "$@"
  printf %s "${words% }"
}
