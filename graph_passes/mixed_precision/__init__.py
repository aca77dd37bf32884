"""Makes a float32 model one of 16 bits: what may be rounded is, what needs float32 stays, and the plan says why."""
