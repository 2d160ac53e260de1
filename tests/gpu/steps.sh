# For tests/gpu/run.sh and run_multi.sh: runs steps under time limits, keeps their logs, and prints the table.
# Wants $logs, a folder.
steps=()
failed=0

# step SECONDS NAME COMMAND...: shows the log's end when it fails, and notes the outcome. Functions may be commands.
step() {
    local limit=$1 name=$2 start=$SECONDS status
    shift 2
    local log=$logs/$name.log
    # A group of its own, so that whatever a step has started ends with it.
    set -m
    ("$@") >"$log" 2>&1 </dev/null &
    local pid=$!
    set +m
    (
        sleep "$limit" &
        trap "kill $! 2>/dev/null; exit" TERM
        wait $!
        echo "ended after its limit of $limit s" >>"$log"
        kill -- -$pid 2>/dev/null
        sleep 5
        kill -9 -- -$pid 2>/dev/null
    ) &
    local watch=$!
    wait $pid
    status=$?
    kill $watch 2>/dev/null
    wait $watch 2>/dev/null
    if [ $status -eq 0 ]; then
        steps+=("ok|$name|$((SECONDS - start)) s|$(tail -n 1 "$log" | cut -c 1-90)")
    else
        failed=1
        steps+=("FAILED|$name|$((SECONDS - start)) s|$(tail -n 1 "$log" | cut -c 1-60) [$log]")
        echo "--- $name"
        tail -n 40 "$log"
    fi
    return 0
}

# show NAME...: the standard output and error of steps.
show() {
    local name
    for name in "$@"; do
        [ -f "$logs/$name.log" ] || continue
        echo "--- $name"
        grep -v '^round \|^built \|^gradgen: ' "$logs/$name.log"
    done
}

# Prints the table and ends. Where OUT is set, one file there holds the table and the ends of all logs of this run.
finish() {
    local table="" name
    [ ${#steps[@]} -gt 0 ] && table=$(printf '%s\n' "${steps[@]}" |
        awk -F '|' '{printf "%-7s %-14s %6s  %s\n", $1, $2, $3, $4}')
    printf '\n%s\n' "$table"
    if [ -n "${OUT:-}" ]; then
        {
            echo "$table"
            printf '%s\n' "${steps[@]}" | cut -d '|' -f 2 | while read -r name; do
                printf '\n--- %s\n' "$name"
                tail -n 400 "$logs/$name.log"
            done
        } >"$OUT/steps.txt"
    fi
    exit $failed
}
