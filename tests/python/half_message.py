"""Sends the first half of a message and waits until it is killed. Usage: half_message.py PORT"""

import socket
import sys
import time

server = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
server.sendall(b"*3\r\n$3\r\nSET\r\n$4\r\nhalf\r\n$1000000\r\n" + b"x" * 300_000)
print("half", flush=True)
time.sleep(1000)
