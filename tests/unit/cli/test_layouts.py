"""Test layouts on the command line of `headway launch`: the plan of each valid one, and the error for invalid ones."""

import shlex

import pytest

from headway.cli import main
from headway.core.config.mesh import Layout
from headway.launch import machine, run


@pytest.fixture
def launch(monkeypatch, capsys, tmp_path):
    """Return a function that runs `headway launch` and returns the plan, or the printed error."""
    plans = []
    monkeypatch.setattr(
        machine, "inspect_machine", lambda environment: machine.Machine("here", "/venv/bin/python", 8, None, ())
    )
    monkeypatch.setattr(run, "execute_plan", lambda plan, environment, **options: plans.append(plan))
    for name in ("HEADWAY_RUN", "HEADWAY_STRATEGY", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()

    def run_launch(line):
        plans.clear()
        with pytest.raises(SystemExit) as exc_info:
            main.main(["launch", *shlex.split(line), "train.py"])
        said = capsys.readouterr()
        assert exc_info.value.code == (0 if plans else 2), said.err
        return plans[0] if plans else said.err

    return run_launch


@pytest.mark.parametrize(
    ("line", "layout"),
    [
        ("-n 8 --strategy fsdp", Layout(shard=8)),
        ("-n 8 --strategy 'FSDP + TP=2'", Layout(shard=4, tp=2)),
        ("-n 8 --use_fsdp", Layout(shard=8)),
        ("-n 8 --use-fsdp --fsdp-sharding-strategy SHARD_GRAD_OP", Layout(shard=8)),
        ("-n 8 --fsdp_sharding_strategy NO_SHARD", Layout(replicate=8)),
        ("-n 8 --fsdp_sharding_strategy NO_SHARD --parallelism_config_dp_replicate_size 8", Layout(replicate=8)),
        ("-n 8 --use_fsdp --strategy hsdp=4", Layout(replicate=2, shard=4)),
        (
            "-n 8 --use_parallelism_config --parallelism_config_dp_shard_size 4 --parallelism_config_tp_size 2",
            Layout(shard=4, tp=2),
        ),
        ("-n 8 --use_deepspeed", Layout(shard=8)),
        ("-n 8 --use_deepspeed --zero_stage 2 --strategy zero2 --offload_optimizer_device none", Layout(shard=8)),
        ("-n 8 --use_deepspeed --strategy zero3 --deepspeed_config_file ds.json", Layout(shard=8)),
        ("-n 8", None),
    ],
)
def test_valid_flags_give_the_expected_layout(launch, line, layout):
    assert launch(line).layout == layout


def test_hsdp_without_a_size_uses_the_machine_size(launch):
    where = "--num_machines 2 --machine_rank 0 --main_process_ip h --main_process_port 5"
    plan = launch(f"-n 8 {where} --strategy hsdp")
    assert plan.layout == Layout(replicate=2, shard=4)
    assert '"ranks_per_machine":4' in plan.additions["HEADWAY_RUN"]
    notes = launch(f"-n 8 {where} --strategy hsdp --min_machines 1 --max_restarts 3").notes
    assert notes == (
        "with 1 of 2 machines: layout hsdp of 8 ranks does not fit 4: the run continues with fsdp=4 (4 shards)",
    )
    assert launch(f"-n 8 {where} --strategy fsdp+tp=2 --min_machines 1 --max_restarts 3").notes == ()


def test_banner_contains_the_layout_and_the_global_batch(launch):
    banner = launch("-n 8 --strategy fsdp+tp=2").banner
    assert "layout fsdp+tp=2 (command line: --strategy): 4 shards x 2 parts of a matrix" in banner
    assert "global batch = micro-batch x 4 data shards x " in banner
    assert "global batch = micro-batch x 8 processes x " in launch("-n 8 --strategy fsdp").banner
    assert "layout" not in launch("-n 1 --strategy fsdp").banner


def test_dry_run_shows_the_groups_of_ranks(launch, capsys):
    with pytest.raises(SystemExit):
        main.main(["launch", "-n", "4", "--strategy", "fsdp+tp=2", "--dry-run", "train.py"])
    output = capsys.readouterr().out
    assert "#   shard = 2: ranks (0 2), (1 3)\n#   tp = 2: ranks (0 1), (2 3)\n" in output


def test_settings_reach_the_workers(launch, tmp_path, monkeypatch):
    told = launch("-n 2 --use_fsdp --fsdp_reshard_after_forward SHARD_GRAD_OP --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP "
                  "--fsdp_transformer_layer_cls_to_wrap A,B").additions["HEADWAY_RUN"]  # fmt: skip
    for part in (
        '"strategy":{"value":"fsdp"',
        '"fsdp_reshard_after_forward":{"value":false',
        '"transformer_based_wrap"',
        '"A,B"',
    ):
        assert part in told
    (tmp_path / "c.yaml").write_text("strategy: hsdp=2\nfsdp_offload_params: true\n")
    plan = launch("-n 4 --config_file c.yaml")
    assert (
        '"fsdp_offload_params":{"value":true,"origin":"file: c.yaml key fsdp_offload_params"'
        in plan.additions["HEADWAY_RUN"]
    )
    monkeypatch.setenv("HEADWAY_STRATEGY", "tp")
    plan = launch("-n 4 --config_file c.yaml")
    assert plan.layout == Layout(tp=4)
    assert plan.notes == (
        "without effect: fsdp_offload_params (file: c.yaml key fsdp_offload_params) needs a layout with shards, but the layout is "
        "tp: 4 parts of a matrix",
    )


def test_flags_without_effect_are_reported_in_one_line(launch):
    [note] = launch(
        "-n 2 --use_fsdp --fsdp_version 2 --fsdp_use_orig_params true --fsdp_state_dict_type FULL_STATE_DICT"
    ).notes
    assert note.startswith("without effect: --fsdp_version (Headway uses FSDP2); --fsdp_use_orig_params (FSDP2 always")
    assert (
        "--fsdp_state_dict_type (checkpoints are sharded and can be loaded under any layout; save_model() writes full weights)"
        in note
    )


WRONG = [
    ("-n 8 --strategy fspd", "'fspd' is unknown; did you mean fsdp?"),
    ("-n 8 --strategy zero", "'zero' is unknown; write fsdp, or zero1, zero2 or zero3"),
    ("-n 8 --strategy pipeline=2", "'pipeline' is unknown; write pp"),
    ("-n 8 --strategy fsdp+tp", "omits more than one size; give all but one, as in hsdp=8 or fsdp+tp=2"),
    ("-n 8 --strategy fsdp+fsdp=2", "gives a size for 'fsdp' twice"),
    ("-n 8 --strategy fsdp+tp=two", "'tp=two' needs a number of ranks after '=', 1 or more"),
    ("-n 8 --strategy tp=0", "'tp=0' needs a number of ranks"),
    ("-n 8 --strategy ''", "strategy='' (command line: --strategy) must be text"),
    (
        "-n 8 --strategy fsdp+tp=3",
        "the nearest that fit 8: fsdp+tp=2, fsdp+tp=4; or run 6 or 9 ranks (command line: --strategy)",
    ),
    ("-n 8 --strategy fsdp=4", "the nearest that fit 8: fsdp=8, ddp=2+fsdp=4; or run 4 ranks"),
    ("-n 7 --strategy hsdp=2", "or run 6 or 8 ranks"),
    (
        "-n 8 --strategy hsdp",
        "this run has only one; give the number of ranks that share a copy (hsdp=2, hsdp=4), or use fsdp",
    ),
    ("-n 1 --strategy tp=2", "takes 2 ranks, but the run has 1; the nearest that fit 1: ddp; or run 2 ranks"),
    ("-n 8 --stategy fsdp", "there is no flag --stategy; did you mean --strategy?"),
    ("-n 8 --fsdp", "--fsdp is not a flag of `headway launch`: set the layout with --strategy fsdp"),
    ("-n 8 --tp_size 2", "sizes are part of the layout: --strategy fsdp+tp=2"),
    (
        "-n 8 --strategy tp --fsdp_offload_params true",
        "a layout with shards, but the layout is tp: 8 parts of a matrix; remove it",
    ),
    ("-n 8 --strategy fsdp --fsdp_offload_params maybe", "--fsdp_offload_params='maybe'; give True or False"),
    ("-n 8 --use_fsdp --fsdp_sharding_strategy HYBRID", "allowed: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD"),
    ("-n 8 --use_fsdp --fsdp_version 3", "--fsdp_version='3'; allowed: 1, 2"),
    ("-n 8 --use_fsdp --fsdp_min_num_params 1e8", "--fsdp_min_num_params='1e8'; give a whole number, 0 or more"),
    ("-n 8 --use_fsdp --fsdp_auto_wrap_policy BY_CLASS", "allowed: TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP, NO_WRAP"),
    ("-n 8 --use_fsdp --fsdp_ignored_modules head", "--fsdp_ignored_modules: name the frozen modules"),
    ("-n 8 --use_fsdp --strategy ddp", "--strategy ddp contradicts fsdp from --use_fsdp; remove one of them"),
    (
        "-n 8 --strategy fsdp --fsdp_sharding_strategy HYBRID_SHARD",
        "--strategy fsdp contradicts hsdp from --fsdp_sharding_strategy",
    ),
    (
        "-n 8 --fsdp_sharding_strategy NO_SHARD --parallelism_config_dp_shard_size 8",
        "--fsdp_sharding_strategy request unsharded models, but --parallelism_config_dp_shard_size requests shards; keep one",
    ),
    (
        "-n 8 --use_fsdp --parallelism_config_tp_size 8",
        "with --parallelism_config_tp_size no processes are left to shard across",
    ),
    ("-n 8 --parallelism_config_tp_size 0", "--parallelism_config_tp_size='0'; give a whole number, 1 or more"),
    (
        "-n 8 --parallelism_config_tp_size 4",
        "takes 4 ranks, but the run has 8; the nearest that fit 8: tp=8, ddp=2+tp=4",
    ),
    ("-n 8 --parallelism_config_sp_size 2", "Ulysses) is not supported"),
    ("-n 8 --strategy fsdp+cp=3", "takes 3 ranks at a time, but the run has 8; the nearest that fit 8: fsdp+cp=2"),
    (
        "-n 8 --strategy cp --parallelism_config_cp_comm_strategy ring",
        "cp_comm_strategy='ring'; allowed: ALLGATHER, ALLTOALL",
    ),
    ("-n 8 --strategy fsdp --cp_comm_strategy alltoall", "needs context parallelism, but the layout is fsdp: 8 shards"),
    ("-n 8 --strategy zero3+tp=2", "but 'zero3' cannot be combined with other terms"),
    (
        "-n 8 --use_deepspeed --use_fsdp",
        "DeepSpeed (--use_deepspeed) and torch's own engine (--use_fsdp) are both requested; keep one",
    ),
    ("-n 8 --use_deepspeed --strategy fsdp", "--strategy fsdp contradicts deepspeed from --use_deepspeed"),
    ("-n 8 --use_deepspeed --zero_stage 0", "--zero_stage='0'; allowed: 1, 2, 3; stage 0 shards nothing"),
    ("-n 8 --use_deepspeed --zero3_init_flag true", "--zero3_init_flag: the full model is built on each process"),
    ("-n 8 --use_deepspeed --offload_param_device disk", "--offload_param_device='disk'; allowed: CPU, NVME"),
    ("-n 8 --use_deepspeed --gradient_clipping high", "--gradient_clipping='high'; give a number"),
    ("-n 8 --strategy fsdp --gradient_clipping 1", "needs DeepSpeed, but the layout is fsdp: 8 shards; remove it"),
    (
        "-n 8 --strategy zero2 --fsdp_offload_params true",
        "a layout with shards, but the layout is zero2: 8 shards; remove it",
    ),
    ("-n 8 --fsdp_reshard_after_forward sometimes", "allowed: FULL_SHARD, SHARD_GRAD_OP"),
]


@pytest.mark.parametrize(("line", "told"), WRONG)
def test_invalid_arguments_are_answered_with_the_correct_command(launch, line, told):
    said = launch(line)
    assert isinstance(said, str), "the invalid command line was planned"
    assert told in said
    [error] = [text for text in said.splitlines() if text.lower().startswith(("headway: error", "error"))]
    assert told in error  # the whole message is on one line
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "strategy: fsdp+tp\n",
            "give all but one, as in hsdp=8 or fsdp+tp=2 (file: c.yaml key strategy)",
        ),
        ("strategy: 8\n", "strategy '8': '8' is unknown"),
        ("fsdp_offload_params: maybe\n", "must be true or false"),
        ("fsdp_auto_wrap_policy: by_class\n", "must be one of transformer_based_wrap, size_based_wrap, no_wrap"),
        ("use_fsdp: true\n", "is not a setting: write strategy: fsdp, or hsdp=8"),
        ("fsdp_version: 2\n", "is not a setting: write strategy: fsdp"),
        ("fsdp_use_orig_params: true\n", "it has no effect here: FSDP2 always keeps"),
        ("parallelism_config_tp_size: 2\n", "write the sizes in the strategy: fsdp=4+tp=2"),
        ("fsdp_config: {fsdp_version: 2}\n", "`headway config import FILE` translates it"),
    ],
)
def test_config_file_is_checked_like_flags(launch, tmp_path, text, told):
    (tmp_path / "c.yaml").write_text(text)
    assert told in launch("-n 8 --config_file c.yaml")


def test_environment_variable_is_checked_like_flags(launch, monkeypatch):
    monkeypatch.setenv("HEADWAY_STRATEGY", "fsdp+tp=3")
    assert "fsdp+tp=2, fsdp+tp=4; or run 6 or 9 ranks (environment: HEADWAY_STRATEGY)" in launch("-n 8")
    monkeypatch.delenv("HEADWAY_STRATEGY")
    monkeypatch.setenv("HEADWAY_STRATEGIE", "fsdp")
    assert "did you mean HEADWAY_STRATEGY?" in launch("-n 8")
