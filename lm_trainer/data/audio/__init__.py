"""Audio: decoding, resampling, log-mel spectrograms, augmentation, and generated Morse code."""
