"""A naive implementation: vLLM's own reload, without the head."""

from pathlib import Path

from rollcorr.engines.transport.weight_folder import checkpoint_weights


class NaiveReloader:
    def rollcorr_reload(self, folder):
        self.reload_weights(weights_iterator=checkpoint_weights(Path(folder)))
