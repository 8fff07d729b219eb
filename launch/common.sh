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

count_flag() { # name default: `flag`, for a flag that must be a whole number
  local value
  value=$(flag "$1" "$2")
  [[ $value =~ ^[0-9]+$ ]] || fail "--$1=$value is not a whole number"
  printf %s "$value"
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

workdir_of() { # the arguments of a t2r command: prints the value of --workdir
  while [ $# -gt 0 ]; do
    case $1 in
      --workdir=*) printf %s "${1#--workdir=}" ;;
      --workdir) printf %s "${2:-}" ;;
    esac
    shift
  done
}

newest_step() { # work directory: prints the step of its newest checkpoint; 0 if it has none
  local path step newest=0
  for path in "$1"/checkpoints/*; do
    step=${path##*/}
    if [[ $step =~ ^[0-9]+$ ]] && [ "$step" -gt "$newest" ]; then newest=$step; fi
  done
  echo "$newest"
}

# Whether a run that ended with a status may be started again:
#   try_again FILE RETRIES WORKDIR STATUS
# Yes after 75 (another process was lost) and 134 (JAX ended the process for the same reason), RETRIES times in all; and
# after 143 (stopped by SIGTERM, and saved). No if there is no newer checkpoint than after the last try: what ended both
# will end the next one too. FILE remembers the number of retries and that checkpoint's step.
try_again() {
  local file=$1 retries=$2 status=$4 step tries=0 before=""
  step=$(newest_step "$3")
  [ ! -e "$file" ] || read -r tries before <"$file"
  case $status in
    143) ;;
    75 | 134) tries=$((tries + 1)) ;;
    *) return 1 ;;
  esac
  if [ "$tries" -gt "$retries" ]; then
    echo "not started again: it was already, $retries times (--retries=$retries); the newest checkpoint is of step $step" >&2
    return 1
  elif [ "$step" = "$before" ]; then
    echo "not started again: the newest checkpoint is still that of step $step, as after the last try" >&2
    return 1
  fi
  echo "$tries $step" >"$file"
}
