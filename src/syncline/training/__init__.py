"""`distribute()`, checkpoints, and the loop behind `syncline train`."""
