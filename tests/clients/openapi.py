"""schemathesis on brain's OpenAPI document: openapi.py BRAIN SCHEMATHESIS [EXAMPLES]

Every address, with thousands of right and wrong requests made from the document: what is answered must
be what the document says, wrong requests must be refused, and nothing may fail. Requests that fit the
document may be refused too: whether a token id or the length of a prompt is right is the model's to say.
"""

import subprocess
import sys
import tempfile

from brain import Brain

PROGRAM, SCHEMATHESIS = sys.argv[1:3]
EXAMPLES = sys.argv[3] if len(sys.argv) > 3 else "100"
PATIENCE = 1800

with tempfile.TemporaryDirectory() as folder:
    with Brain(PROGRAM, "--device", "fake", "--response-dir", f"{folder}/responses") as brain:
        command = [SCHEMATHESIS, "run", f"{brain.url}/openapi.json", "--url", brain.url]
        command += ["--exclude-checks", "positive_data_acceptance", "--max-examples", EXAMPLES]
        command += ["--continue-on-failure", "--request-timeout", "30", "--warnings", "off"]
        command += ["--no-color", "--seed", "1"]
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, timeout=PATIENCE)
        alive = brain.process.poll() is None
lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
if done.returncode != 0 or not alive:
    print(done.stdout, file=sys.stderr)
    print("brain is alive" if alive else "brain has died", file=sys.stderr)
cases = next((line for line in lines if "generated" in line), "nothing was tried")
print(cases)
sys.exit(0 if done.returncode == 0 and alive and "generated" in cases else 1)
