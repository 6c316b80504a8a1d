# What all jobs of the run smoke share. Written by `tidemill slurm`; its sbatch files read it.

cd '/home/me/my project' || exit 1
export PATH=/opt/tidemill/bin:$PATH
run_dir='/home/me/my project/runs/smoke'
here='/home/me/my project/runs/smoke/slurm'     # this file, the sbatch files and the logs: on a file system that all nodes share
config=$run_dir/config.yaml
stopped= program= code=0
# The last task of an array has the id of the array itself, which stands for all of its tasks.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}

# State of this job. Not RUNNING: Slurm ends it (requeue, preemption, scancel), and has sent SIGTERM to all its processes.
state() { squeue --noheader --job="$job" --format=%T; }

# Near its time limit Slurm signals this shell alone (--signal=B:TERM), which passes the signal on.
on_term() {
    stopped=1
    if [ "$(state)" = RUNNING ]; then pass_on; fi
}
trap on_term TERM

# Run a program to its end. Sets `code` to its exit code.
run_to_end() {
    "$@" &
    program=$!
    while wait "$program"; code=$?; kill -0 "$program" 2>/dev/null; do :; done
}

# Resume this job later, unless Slurm does that itself, or a scancel ends it.
requeue() {
    if [ "$(state)" = RUNNING ]; then scontrol requeue "$job"; fi
    exit "$code"
}
