"""The state of training, and where its arrays rest."""
