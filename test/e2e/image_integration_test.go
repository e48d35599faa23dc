//go:build integration

package e2e

import (
	"strings"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/testkit"
)

func TestBaseImageHasTheProgramsOfTheQuickStart(t *testing.T) {
	b := commonNode(t).newBox(t)
	has := b.exec(`. /etc/os-release; echo "$ID $VERSION_ID"; python3 --version; node --version; git --version; curl --version`)
	for _, want := range []string{"debian 13\n", "\nPython 3.13.", "\nv20.", "\ngit version ", "\ncurl "} {
		if !strings.Contains(has, want) {
			t.Errorf("no %q in %s", want, has)
		}
	}
}

// TestBaseImageHasWhatAgentsCall runs each program once.
func TestBaseImageHasWhatAgentsCall(t *testing.T) {
	runs(t, commonNode(t).newBox(t), map[string]string{
		"python -c 'print(6 * 7)'":                   "42\n",
		"python3 -c 'import ssl, sqlite3; print(1)'": "1\n",
		"bash -lc 'python -m pip --version'":         "pip ",
		"pip --version":                              "/usr/local/",
		"npm --version":                              ".",
		"npx --version":                              ".",
		`echo '{"a":7}' | jq .a`:                     "7\n",
		"wget --version":                             "GNU Wget",
		"echo shown | less -FX":                      "shown\n",
		"vi --version":                               "Vi IMproved",
		"nano --version":                             "nano",
		"cd /tmp && echo x >z && zip -q z.zip z && unzip -p z.zip": "x\n",
		"echo x | xz | xz -d":                                                                              "x\n",
		`printf 'all:\n\t@echo made\n' | make -f -`:                                                        "made\n",
		`echo 'int main(){return 7;}' | gcc -o /tmp/c -xc - && /tmp/c; echo $?`:                            "7\n",
		`printf '#include <iostream>\nint main(){std::cout<<"c++\\n";}' | g++ -o /tmp/d -xc++ - && /tmp/d`: "c++\n",
		"ssh -V 2>&1": "OpenSSH",
		"ssh-keygen -q -t ed25519 -N '' -f /tmp/key && echo made": "made\n",
		"rg --no-filename localhost /etc/hosts":                   "localhost",
		"sqlite3 :memory: 'select 6*7'":                           "42\n",
		"ping -c 1 -W 5 127.0.0.1":                                " 0% packet loss",
		"ps -o comm= -p $$":                                       "sh\n",
		"file /bin/bash":                                          "ELF 64-bit",
		"rsync --version":                                         "rsync",
		"git --version":                                           "git version",
		"id -un":                                                  "root\n",
	})
}

// runs runs each command once, which has to print that text and succeed.
func runs(t *testing.T, b *box, commands map[string]string) {
	t.Helper()
	for command, want := range commands {
		if got := b.try(command); got.ExitCode != 0 || !strings.Contains(got.Stdout, want) {
			t.Errorf("%s: exit code %d, output %q %q; want %q", command, got.ExitCode, got.Stdout, got.Stderr, want)
		}
	}
}

// image is an edit for newBox.
func image(name string) func(*types.CreateSandboxRequest) {
	return func(req *types.CreateSandboxRequest) { req.Image = name }
}

func TestPythonImageHasItsLibraries(t *testing.T) {
	b := commonNode(t).newBox(t, image("python"))
	// Before the first import, which would make them.
	runs(t, b, map[string]string{
		"ls ~/.cache/matplotlib": "fontlist-",
		"cd /usr/lib/python3/dist-packages; for m in pandas numpy matplotlib IPython ipykernel; do ls $m/__pycache__/__init__.*.pyc; done | wc -l": "5\n",
	})
	runs(t, b, map[string]string{
		`python3 -c 'import pandas as p; print(p.DataFrame({"a": [1, 2, 4]}).a.sum())'`:                                              "7\n",
		`python3 -c 'import pandas as p; print(p.DataFrame({"a": [7]}).style.to_html())'`:                                            ">7</td>",
		`cd /tmp && python3 -c 'import pandas as p; p.DataFrame({"a": [7]}).to_excel("a.xlsx"); print(p.read_excel("a.xlsx").a[0])'`: "7\n",
		`python3 -c 'import numpy.testing, scipy.stats; print(scipy.stats.norm.cdf(0))'`:                                             "0.5\n",
		`python3 -c 'import sympy; print(sympy.sqrt(8))'`:                                                                            "2*sqrt(2)\n",
		`cd /tmp && python3 -c 'import matplotlib.pyplot as p; p.plot([1, 2]); p.savefig("a.png")' && file a.png`:                    "PNG image data, 640 x 480",
		`python3 -c 'import httpx, requests; print(httpx.__version__)'`:                                                              "0.",
		`python3 -c '
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel()
client.execute_interactive("import matplotlib.pyplot as p; p.plot([1, 2]); p.show()",
    output_hook=lambda m: print(*m["content"].get("data", {})))
manager.shutdown_kernel()'`: "image/png",
	})
}

func TestNodeImageHasItsTools(t *testing.T) {
	b := commonNode(t).newBox(t, image("node"))
	runs(t, b, map[string]string{
		"node --version": "v20.",
		"npm --version":  "9.",
		"pnpm --version": "12.",
		"yarn --version": "1.22.",
		"tsc --version":  "Version 7.",
		"deno --version": "deno 2.",
		`cd /tmp && echo 'const x: number = 6; console.log(x * 7)' >a.ts && tsc a.ts && node a.js && deno run a.ts`: "42\n42\n",
		// The kernel listens on the ports that its client chose.
		`bash <<'SCRIPT'
cat >/tmp/kernel.json <<'END'
{"transport": "tcp", "ip": "127.0.0.1", "key": "k", "signature_scheme": "hmac-sha256",
 "shell_port": 7001, "iopub_port": 7002, "stdin_port": 7003, "control_port": 7004, "hb_port": 7005}
END
deno jupyter --kernel --conn /tmp/kernel.json >/dev/null 2>&1 &
kernel=$!
while kill -0 $kernel; do
	for port in 7001 7002 7003 7004 7005; do
		(: </dev/tcp/127.0.0.1/$port) 2>/dev/null || continue 2
	done
	echo listens
	kill $kernel
	break
done
SCRIPT`: "listens\n",
	})
}

func TestImageThatIsNotBuiltHasItsRemedy(t *testing.T) {
	n := commonNode(t)
	for name, want := range map[string]struct {
		code problem.Code
		text string
	}{
		"localhost/doze/nothing:latest": {problem.ImageUnavailable, "`make image-nothing`"},
		"pyton":                         {problem.ImageNotAllowed, "base, full, node, python"},
	} {
		_, _, err := n.API.Create(testkit.Context(t), types.CreateSandboxRequest{Name: "not-built", Image: name})
		if !problem.Has(err, want.code) || !strings.Contains(err.Error(), want.text) {
			t.Errorf("image %s: %v; want %q", name, err, want.text)
		}
	}
}

// TestPipInstallsPackages without an option and without a virtual environment of the
// user's: PEP 668 is for systems with a package manager of their own.
func TestPipInstallsPackages(t *testing.T) {
	b := commonNode(t).newBox(t)
	b.exec(`mkdir -p /tmp/p/greeter && cd /tmp/p
cat >pyproject.toml <<'END'
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "greeter"
version = "1.0"
[project.scripts]
greet = "greeter:main"
END
echo 'def main(): print("hello")' >greeter/__init__.py
python -c 'from setuptools import build_meta as b; b.build_sdist("/tmp/sdist"); b.build_wheel("/tmp/wheel")' >/dev/null 2>&1`)
	for _, kind := range []string{"wheel/greeter-1.0-py3-none-any.whl", "sdist/greeter-1.0.tar.gz"} {
		b.exec("cd / && pip install --no-index --no-build-isolation /tmp/" + kind)
		if got := b.exec("cd / && greet && python3 -c 'import greeter; greeter.main()'"); got != "hello\nhello" {
			t.Errorf("%s: %q", kind, got)
		}
		b.exec("cd / && pip uninstall --yes greeter")
	}
	// A project's own environment is apart, as everywhere.
	if got := b.exec("cd /tmp && python3 -m venv own && own/bin/python -c 'import sys; print(sys.prefix)'"); got != "/tmp/own" {
		t.Errorf("a virtual environment is at %q", got)
	}
}
