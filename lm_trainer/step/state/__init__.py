"""The state of training, and the sharding of its arrays in storage."""
