"""Accepts one client on 127.0.0.1 by one blocking call, and echoes it. Any error of that call ends the server.

Usage: accept_once.py PORT
"""

import socket
import sys
import time

listener = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=16)
client, _ = listener.accept()
with client:
    while data := client.recv(65536):
        client.sendall(data)
time.sleep(1000)
