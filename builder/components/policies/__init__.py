"""Robot policies from the directories that LeRobot writes: parts, and what stands between a robot and their network."""
