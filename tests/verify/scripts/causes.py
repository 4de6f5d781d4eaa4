"""The cause that a good report names for each faulty script. `run_collection.py` grades reports with it.

`words` is a regular expression that must match in the result or the details of a failed proof. `code` is
text of the line with the fault. It is empty if the fault is not in a single line. Several texts are alternatives.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Planted:
    """The planted cause of one faulty script.

    Attributes:
        words: Regular expression. Case is ignored.
        code: Texts of the script's lines, each of which is a right place. If empty, any line or none is right.
    """

    words: str
    code: tuple[str, ...] = ()


PLANTED = {
    "accelerate_position_not_skipped": Planted("begins anew"),
    "adapter_with_two_zeros": Planted(r"gradient of adapter\.down.*zero"),
    "adapters_cut_by_checkpointing": Planted(r"blocks\.0\.down.*no gradient"),
    "adapters_not_in_optimizer": Planted(r"lora_A.*no prepared optimizer", ("AdamW(parameters",)),
    "advantages_of_own_rank": Planted("(mean|std).*statistic over the rows of one rank", ("advantage = (reward",)),
    "always_the_first_batch": Planted("first of a new pass"),
    "attention_over_padding": Planted("padding"),
    "augmentation_by_the_clock": Planted(r"datetime\.now", ("datetime.now()",)),
    "augmentation_unseeded_in_workers": Planted("RandomState.*no seed", ("RandomState()",)),
    "average_only_evaluated": Planted("AveragedModel", ("average = AveragedModel",)),
    "batch_norm_compiled": Planted("BatchNorm.*stem"),
    "batch_norm_local": Planted(r"BatchNorm.*\b1\b"),
    "batches_by_own_counter": Planted("position", ("model(rows)", "rows, targets = x[first")),
    "bert_without_attention_mask": Planted("padding"),
    "best_loss_of_own_rank": Planted("other learning rates", ('group["lr"] /= 2',)),
    "branch_detached": Planted(r"second\.0\.weight.*no gradient"),
    "calls_counted_in_forward": Planted(r"number", ("penalty = min",)),
    "causal_mask_forgotten": Planted("scaled_dot_product_attention", ("scaled_dot_product_attention(q, k, v)",)),
    "class_weights_mean": Planted("class weights", ("weight=class_weights",)),
    "clipped_per_micro_batch": Planted("before all micro-batches", ("clip_grad_norm_",)),
    "compiled_loss_local_std": Planted("std.*statistic over the rows of one rank", ("expected.std()",)),
    "constant_buffer_changed": Planted("buffer deviation changes", ("deviation += 1e-2",)),
    "curriculum_not_registered": Planted("number.*2 instead of 5", ("< hidden",)),
    "decision_by_one_rank": Planted("learning rate", ('group["lr"] *= 0.5',)),
    "detached_features": Planted(r"item\.weight.*no gradient.*linear", ("self.item(item)",)),
    "distributed_sampler_prepared": Planted("DistributedSampler"),
    "drawn_after_sharding": Planted(r"4\.weight has another value", ("normal_(std=0.02)",)),
    "epochs_counted_by_script": Planted(r"accelerator\.epochs"),
    "evaluation_keeps_graphs": Planted("kept with their graphs", ("outputs.append",)),
    "expert_never_chosen": Planted("expert 3"),
    "files_in_listed_order": Planted("order of a folder", ("os.listdir",)),
    "frozen_backbone_norms_move": Planted(r"backbone\.1 is frozen, but its running"),
    "frozen_late_still_decays": Planted(r"encoder\.0\.weight.*frozen in update 3, but"),
    "future_in_the_normalization": Planted("all steps", ("rows = (rows - rows.mean",)),
    "generator_without_seed": Planted("default_rng.*no seed", ("default_rng()",)),
    "hardest_rows_of_rank": Planted("topk.*select", ("losses.topk",)),
    "head_drawn_after_prepare": Planted(r"2\.weight", ("nn.init.normal_",)),
    "head_frozen_with_the_encoder": Planted(r"encoder_head\.weight.*frozen"),
    "head_missing_in_optimizer": Planted(r"head\.weight.*no prepared optimizer", ("AdamW(model.body",)),
    "hooks_pile_up": Planted("memory grows", ("register_forward_hook",)),
    "inner_loop_by_time": Planted("clock.*perf_counter", ("end = time.perf_counter", "while time.perf_counter")),
    "labels_not_shifted": Planted("same position"),
    "last_expert_out_of_range": Planted(r"expert 3 of experts\.up"),
    "layer_added_after_optimizer": Planted(r"special\.weight.*no prepared optimizer", ("Adam(model.parameters",)),
    "learning_rate_times_processes": Planted("learning rate is 0.04", ("SGD(model.parameters", "learning_rate = 0.02")),
    "local_negatives": Planted("negatives|other rows of its rank", ("scores = 4 * a @ b.T",)),
    "logging_draws_on_rank_zero": Planted(r"only rank 0 draws from random\.randrange", ("random.randrange",)),
    "lookahead_forgets_its_counter": Planted("script changes it", ("fast.copy_(slow)",)),
    "loss_is_a_sum": Planted("loss is a sum", ('reduction="sum"',)),
    "loss_times_processes": Planted("a number.*2", ("loss * accelerator.num_processes",)),
    "losses_kept_with_graphs": Planted("kept with their graphs", ("loss = nn.functional.mse_loss",)),
    "mask_shows_the_next_token": Planted("changing tokens from position.*softmax", ("masked_fill",)),
    "mean_over_local_tokens": Planted("tokens", ("ignore_index=PAD",)),
    "mean_teacher_not_registered": Planted("tensor.*Linear", ("teacher(rows)",)),
    "no_seed": Planted("no seed is set"),
    "noise_of_rank_under_tp": Planted("uniform_.*draws other random numbers", ("uniform_(-1, 1",)),
    "noise_seeded_by_rank": Planted("draws other random numbers", ("everyone = torch.randn",)),
    "norms_of_local_shards": Planted("shard", ("gradient.mul_",)),
    "numpy_generator_in_workers": Planted(r"Crops\.generator.*workers"),
    "optimizer_reset_after_resume": Planted("empties the optimizer's state"),
    "order_drawn_by_each_rank": Planted("draws its own order"),
    "own_generator_not_saved": Planted("number share", ("rows = share * rows",)),
    "packed_with_a_mask_of_ones": Planted("first document of a row changes"),
    "packed_without_boundaries": Planted("scaled_dot_product_attention", ("is_causal=True",)),
    "plateau_by_local_loss": Planted("scheduler gets another value on each rank", ("schedule.step(loss.item())",)),
    "queue_filled_by_loss_function": Planted(r"tensor.*(queue\.rows|rows)", ("queue.rows.T",)),
    "random_module_not_seeded": Planted("generator of random", ("random.random() < 0.5",)),
    "ranks_own_part_prepared": Planted("ranks gave prepare.. different data"),
    "replay_buffer_not_saved": Planted(r"cat\(\)", ("torch.cat(parts)",)),
    "running_loss_weight_not_saved": Planted(r"number means\['size'\]", ("losses[name] / means[name]",)),
    "running_scale_of_local_rows": Planted("amax.*statistic over the rows of one rank", ("self.value.lerp_",)),
    "schedule_ends_early": Planted("learning rate.*LambdaLR", ("schedule.step()",)),
    "schedule_not_prepared": Planted("learning rate.*LambdaLR", ("schedule.step()",)),
    "seed_from_the_clock": Planted("seed.*another one in each run", ("set_seed(seeds[0])", "int(time.time()")),
    "slow_collate": Planted("collate function.*blur"),
    "slow_item": Planted("reading one sample.*__getitem__"),
    "softmax_over_the_batch": Planted("softmax", ("softmax(dim=0)",)),
    "split_drawn_by_each_rank": Planted("ranks gave prepare.. different data"),
    "stays_in_eval_mode": Planted("evaluation mode", ("model.eval()",)),
    "step_counter_not_saved": Planted("learning rate", ('group["lr"] = BASE_RATE',)),
    "steps_per_epoch_counted": Planted("without the kill ends after 5"),
    "stream_drops_its_tail": Planted("end of the data"),
    "stream_in_two_workers": Planted("2 workers yields the whole stream"),
    "stream_not_prepared": Planted("not prepared"),
    "stream_position_not_saved": Planted("stream Corpus.*state_dict"),
    "stream_split_twice": Planted("share out the data otherwise", ("accelerator.prepare", "DataLoader(stream")),
    "target_network_by_rank": Planted("weight of a Linear", ("target(rows)",)),
    "targets_drawn_by_loss_function": Planted("number", ("next(levels)",)),
    "teacher_updated_by_main": Planted("only rank 0 changes the weights", ("mine.lerp_",)),
    "tie_becomes_copy_on_resume": Planted(r"parameter head\.weight.*untied copy"),
    "token_mean_accumulated": Planted("mean over the counted tokens", ("F.cross_entropy",)),
    "trainer_optimizer_without_the_head": Planted(r"head\.weight.*no prepared optimizer", ("AdamW(model.body",)),
    "trainer_running_mean_not_saved": Planted(r"number self\.mean", ("loss = error / self.mean",)),
    "transformers_trainer_unseeded_noise": Planted("default_rng.*no seed", ("default_rng()",)),
    "unfrozen_after_prepare": Planted(r"body\.0\.weight.*no prepared optimizer", ("Adam([p for p",)),
    "vocabulary_from_a_set": Planted("order of a set"),
    "warmup_counts_rows_of_rank": Planted("learning rate is", ('group["lr"] =',)),
    "weights_clamped_by_main_process": Planted(r"0\.weight", ("parameter.clamp_",)),
    "zero_grad_each_micro_batch": Planted("clears gradients before", ("optimizer.zero_grad()",)),
}
"""The planted cause for each name of a script."""
