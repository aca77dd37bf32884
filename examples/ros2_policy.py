"""A ROS 2 node that drives a robot with the engines of a LeRobot policy. It has not been run on a robot.

    python ros2_policy.py --ros-args -p policy:=act -p engines:=act-engines -p camera:=observation.images.top

Subscribes to /joint_states and /camera/image_raw (rgb8), and publishes the joints' positions to /joint_commands at the
rate that `hz` says. Needs rclpy of a ROS 2 installation, which is no package of PyPI.
"""

from typing import Any

import numpy as np
import rclpy
from rclpy.node import Node
from sensor_msgs.msg import Image, JointState

import trt_nvfp4.lerobot


class PolicyNode(Node):
    """Keeps the newest image and joints, and turns them into an action at each tick."""

    def __init__(self) -> None:
        super().__init__("trt_nvfp4_policy")
        defaults = {"policy": "", "engines": "", "camera": "observation.images.top", "task": "", "hz": 20.0}
        for name, value in defaults.items():
            self.declare_parameter(name, value)
        self.policy = trt_nvfp4.lerobot.load(self.value("policy"), self.value("engines")).raw
        self.observation: dict[str, Any] = {"task": self.value("task")}
        self.names: list[str] = []
        self.create_subscription(Image, "/camera/image_raw", self.see, 1)
        self.create_subscription(JointState, "/joint_states", self.feel, 1)
        self.commands = self.create_publisher(JointState, "/joint_commands", 1)
        self.create_timer(1 / self.value("hz"), self.act)

    def value(self, name: str) -> Any:
        return self.get_parameter(name).value

    def see(self, message: Image) -> None:
        rows = np.frombuffer(message.data, np.uint8).reshape(message.height, message.step)
        self.observation[self.value("camera")] = rows[:, : 3 * message.width].reshape(message.height, -1, 3)

    def feel(self, message: JointState) -> None:
        self.names = list(message.name)
        self.observation["observation.state"] = np.asarray(message.position)

    def act(self) -> None:
        if len(self.observation) < 3:  # the camera or the joints have sent nothing yet
            return
        action = self.policy.select_action(self.observation)
        self.commands.publish(JointState(name=self.names, position=action.tolist()))


if __name__ == "__main__":
    rclpy.init()
    rclpy.spin(PolicyNode())
