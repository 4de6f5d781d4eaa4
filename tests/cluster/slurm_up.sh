#!/usr/bin/env bash
# A real SLURM on this host, loopback only: slurm_up.sh start FOLDER | stop FOLDER. Needs Debian's slurmctld, slurmd, slurm-client
# and munge, and root. FOLDER gets keys, configuration, logs and pid files; nothing outside it is written but munge's run folder.
set -euo pipefail

command=${1:?start or stop} folder=$(realpath -m "${2:?a folder}")
# One host plays several: slurmd is started once for each of these names, each on a free port of its own.
# The first in SLURM's order must be a name that leads here, as it becomes the address of machine 0.
nodes=("$(hostname -s)" "$(hostname -s)-2")

free_ports() {
    python3 - "$1" <<'PYTHON'
import socket, sys
probes = [socket.socket() for _ in range(int(sys.argv[1]))]
for probe in probes:
    probe.bind(("127.0.0.1", 0))
print(*(probe.getsockname()[1] for probe in probes))
PYTHON
}

start() {
    trap 'code=$?; [ $code = 0 ] || stop; exit $code' EXIT
    for program in slurmctld slurmd munged srun; do
        command -v "$program" >/dev/null || PATH=$PATH:/usr/sbin command -v "$program" >/dev/null || { echo "no $program"; exit 3; }
    done
    mkdir -p "$folder"/{state,log,run} && chmod 755 "$folder"
    read -r -a ports <<<"$(free_ports $((${#nodes[@]} + 1)))"
    dd if=/dev/urandom of="$folder/munge.key" bs=128 count=1 status=none
    chmod 400 "$folder/munge.key"
    munged --force --key-file="$folder/munge.key" --socket="$folder/run/munge.socket" --pid-file="$folder/run/munged.pid" \
        --log-file="$folder/log/munged.log" --seed-file="$folder/state/munge.seed"
    host=$(hostname -s)
    {
        cat <<CONF
ClusterName=headway
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/run/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/state/%n
SlurmctldPidFile=$folder/run/slurmctld.pid
SlurmdPidFile=$folder/run/slurmd-%n.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=5
SlurmdTimeout=60
JobRequeue=1
SchedulerParameters=sched_interval=1
RebootProgram=/bin/true
SlurmdParameters=config_overrides
CONF
        for index in "${!nodes[@]}"; do
            echo "NodeName=${nodes[$index]} NodeAddr=127.0.0.1 NodeHostname=$host Port=${ports[$((index + 1))]} CPUs=4 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=1000 State=UNKNOWN"
        done
        echo "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP"
    } >"$folder/slurm.conf"
    export SLURM_CONF=$folder/slurm.conf PATH=$PATH:/usr/sbin
    slurmctld -c
    for node in "${nodes[@]}"; do
        mkdir -p "$folder/state/$node"
        slurmd -N "$node"
    done
    for _ in $(seq 100); do
        [ "$(sinfo -h -N -t idle -o %N 2>/dev/null | sort -u | wc -l)" = "${#nodes[@]}" ] && exit 0
        sleep 0.2
    done
    echo "the nodes do not come up:"; sinfo -N || true; tail -n 5 "$folder"/log/*
    exit 4
}

stop() {
    for file in "$folder"/run/*.pid; do
        [ -e "$file" ] || continue
        pid=$(cat "$file")
        kill "$pid" 2>/dev/null || continue
        for _ in $(seq 50); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
        kill -9 "$pid" 2>/dev/null || true
    done
}

"$command"
