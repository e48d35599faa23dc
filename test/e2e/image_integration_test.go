//go:build integration

package e2e

import (
	"strings"
	"testing"
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
	b := commonNode(t).newBox(t)
	for command, want := range map[string]string{
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
	} {
		if got := b.try(command); got.ExitCode != 0 || !strings.Contains(got.Stdout, want) {
			t.Errorf("%s: exit code %d, output %q %q; want %q", command, got.ExitCode, got.Stdout, got.Stderr, want)
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
