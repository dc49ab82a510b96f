"""Answer for all parts in one write, as a driver may that has several tasks."""

import json
import os
import sys

asked = [json.loads(sys.stdin.readline())["number"] for _ in range(int(sys.argv[1]))]
lines = [json.dumps({"number": number, "failure": ""}) + "\n" for number in asked]
os.write(1, "".join(lines).encode())
sys.stdin.read()
