"""Audio of rows: decoding, resampling, log-mel spectrograms, their augmentation, and Morse code made on the spot."""
