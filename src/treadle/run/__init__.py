"""The parts of a `Loop`: training, evaluation, prefetching, hook dispatch, resume, warm start."""
