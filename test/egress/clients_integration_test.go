//go:build integration

package egress

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/testkit"
)

// mode from a client to a server.
type mode struct{ name, zone string }

// modes: the node intercepts requests and authenticates them, or passes bytes through.
var modes = []mode{{"intercepted", "look"}, {"passed through", "pass"}}

// host of the test's servers that is reached that way.
func (w mode) host(name string) string { return name + "." + w.zone + ".test" }

// user of a client: a sandbox in which the server is trusted.
type user struct {
	*box
	mode
	host string
	env  map[string]string
}

// privateCA is where a user puts the CA of a server that has a private one.
const privateCA = "/srv/private-ca.pem"

// withBearer is the policy of most of these tests, withBasic the one of git's.
const (
	withBearer = `{"name":"bearer","secrets":{"token":"%s"}}`
	withBasic  = `{"name":"basic","config":{"user":"` + gitUser + `"},"secrets":{"password":"%s"}}`
)

// eachMode runs a test in a sandbox whose requests to a host are authenticated by
// the policy, and in one from which they pass through.
func eachMode(t *testing.T, host, policy string, test func(u *user), edit ...func(*types.CreateSandboxRequest)) {
	for _, w := range modes {
		t.Run(w.name, func(t *testing.T) {
			n := commonNode(t)
			u := &user{n.newBox(t, edit...), w, w.host(host), map[string]string{}}
			if w.zone == "look" {
				secret := host + "-token"
				n.secret(t, secret, token, u.host)
				u.rules(fmt.Sprintf(`[{"name":"client","hosts":[%q],"policies":[`+policy+`]}]`, u.host, secret))
			} else {
				u.trustServers()
			}
			test(u)
		})
	}
}

// withClients is for clients that the base image lacks.
func withClients(req *types.CreateSandboxRequest) { req.Image = "localhost/doze/test-clients:latest" }

// trustServers makes clients trust the certificates of the test's servers.
func (u *user) trustServers() {
	u.write(privateCA, 0o644, u.node.servers.ca)
	for _, name := range []string{"SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS", "PIP_CERT"} {
		u.env[name] = privateCA
	}
}

func (b *box) write(path string, mode os.FileMode, data []byte) {
	b.t.Helper()
	if _, err := b.node.API.WriteFile(testkit.Context(b.t), b.id, path, mode, strings.NewReader(string(data))); err != nil {
		b.t.Fatal(err)
	}
}

// does runs a shell command, of any duration, that has to succeed, and returns
// what it prints.
func (u *user) does(command string) string {
	u.t.Helper()
	r, err := u.node.API.Exec(u.t.Context(), u.id, client.ExecRequest{Command: types.Command{Command: command, Env: u.env}, Timeout: client.NoTimeout})
	if err != nil {
		u.t.Fatalf("%s: %v", command, err)
	}
	if r.ExitCode != 0 {
		u.t.Fatalf("%s: exit code %d\n%s%s\nflows: %+v", command, r.ExitCode, r.Stdout, r.Stderr, u.flows(client.FlowFilter{}))
	}
	if strings.Contains(r.Stdout+r.Stderr, token) {
		u.t.Fatalf("%s: the secret is in its output: %s%s", command, r.Stdout, r.Stderr)
	}
	return strings.TrimSpace(r.Stdout)
}

// prints fails unless a shell command prints that.
func (u *user) prints(want, command string) {
	u.t.Helper()
	if got := u.does(command); got != want {
		u.t.Errorf("%s: got %q, want %q", command, got, want)
	}
}

// url of the server, with a path.
func (u *user) url(path string) string { return "https://" + u.host + path }

func TestCurl(t *testing.T) {
	eachMode(t, "curl", withBearer, func(u *user) {
		for flag, proto := range map[string]string{"--http1.0": "", "--http1.1": "1.1", "--http2": "2"} {
			if flag == "--http1.0" {
				u.prints("to the end", "curl -sSf "+flag+" "+u.url("/until-closed"))
				continue
			}
			got := parseSeen(t, u.does("curl -sSf "+flag+" "+u.url("/client/path?q=%2F")))
			if got.Method != "GET" || got.URI != "/client/path?q=%2F" || got.Host != u.host {
				u.t.Errorf("%s: the server got %+v", flag, got)
			}
			u.prints(proto, "curl -sSf "+flag+" -o /dev/null -w '%{http_version}' "+u.url("/client/"))
			const size = 50_000_000
			u.prints(blobDigest(size)+"  -", fmt.Sprintf("curl -sSf %s %s | sha256sum", flag, u.url(fmt.Sprint("/blob?size=", size))))
			// Ten megabytes, whose length the client announces or does not.
			u.does("head -c 10000000 /dev/urandom >/srv/body")
			sum := u.does("sha256sum </srv/body | cut -c1-64")
			for from, length := range map[string]int64{"--data-binary @/srv/body": 10_000_000, "-T - </srv/body": -1} {
				got := u.digested(fmt.Sprintf("curl -sSf %s %s %s", flag, u.url("/digest"), from))
				if got.Size != 10_000_000 || got.SHA256 != sum || got.Length != length {
					u.t.Errorf("%s %s: the server got %+v", flag, from, got)
				}
			}
		}
	})
}

// digested is the server's description of a body that a command sent.
func (u *user) digested(command string) (got received) {
	u.t.Helper()
	if text := u.does(command); json.Unmarshal([]byte(text), &got) != nil {
		u.t.Fatalf("%s: %s", command, text)
	}
	return got
}

// A client that expects 100 sends its body when the server wants it, and keeps it
// when the server does not.
func TestCurlAwaits100Continue(t *testing.T) {
	eachMode(t, "continue", withBearer, func(u *user) {
		u.does("head -c 3000000 /dev/zero >/srv/body")
		// curl itself would go on after a second.
		send := "curl -sS --http1.1 --expect100-timeout 60 -H 'Expect: 100-continue' --data-binary @/srv/body -o /dev/null "
		u.prints("HTTP/1.1 100 Continue 200 3000000", send+"-D /srv/head -w '%{http_code} %{size_upload}' "+u.url("/digest")+" >/srv/end; echo $(head -n1 /srv/head | tr -d '\\r') $(cat /srv/end)")
		u.prints("413 0", send+"-w '%{http_code} %{size_upload}' "+u.url("/too-big"))
	})
}

func TestGit(t *testing.T) {
	eachMode(t, "git", withBasic, func(u *user) {
		name := u.zone + ".git"
		out, err := exec.CommandContext(t.Context(), "git", "init", "--bare", "-q", "-b", "main", filepath.Join(u.node.servers.repositories, name)).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		u.env["GIT_TERMINAL_PROMPT"] = "0"
		// More than http.postBuffer, so that the push is sent in chunks.
		u.does(`cd /srv && git config --global user.name a && git config --global user.email a@b.test && git config --global init.defaultBranch main &&
			git init -q one && cd one && head -c 5000000 /dev/urandom >large && echo hello >small && git add . && git commit -qm first &&
			git push -q ` + u.url("/git/"+name) + ` main`)
		u.prints("hello", "cd /srv && git clone -q "+u.url("/git/"+name)+" two && cmp one/large two/large && cat two/small")
		u.does(`cd /srv/two && echo more >>small && git commit -qam second && git push -q`)
		u.prints("hello\nmore", `cd /srv/one && git pull -q `+u.url("/git/"+name)+` main && cat small`)
		u.prints("1", "git clone -q --depth 1 "+u.url("/git/"+name)+" /srv/three && git -C /srv/three log --oneline | wc -l")
		if u.zone != "look" {
			return
		}
		// A clone by the API is authenticated, too. The output of this command is searched for the
		// secret, and so is everything readable in the sandbox at its end.
		if _, err := u.node.API.CloneRepository(testkit.Context(t), u.id, types.GitCloneRequest{URL: u.url("/git/" + name), TargetDir: "/srv/four"}, nil); err != nil {
			t.Fatal(err)
		}
		r := u.try("cat /srv/four/.git/config /proc/[0-9]*/environ; find /root -type f -print -exec cat {} +")
		all := string(plain(r.Stdout, r))
		for _, there := range []string{"\turl = " + u.url("/git/"+name), "HOME=/root\x00", "\temail = a@b.test"} {
			if !strings.Contains(all, there) {
				t.Errorf("there is not even %q", there)
			}
		}
	})
}

func TestPython(t *testing.T) {
	eachMode(t, "python", withBearer, func(u *user) {
		for _, program := range map[string]string{
			"urllib": `
import json, sys, urllib.request
with urllib.request.urlopen(sys.argv[1] + "?a=b") as r: print(json.load(r)["uri"])
with urllib.request.urlopen(urllib.request.Request(sys.argv[1], data=b"x" * 1000, method="PUT")) as r: print(len(json.load(r)["body"]))`,
			// It has its own roots, and the variable leads it to the others.
			"requests": `
import sys
from pip._vendor import requests
s = requests.Session()
print(s.get(sys.argv[1], params={"a": "b"}).json()["uri"])
print(len(s.put(sys.argv[1], data=iter([b"x" * 500, b"x" * 500])).json()["body"]))`,
		} {
			u.write("/srv/client.py", 0o644, []byte(program)) // not its own name, by which it would be imported
			u.prints("/client/?a=b\n1000", "python3 /srv/client.py "+u.url("/client/"))
		}
	})
}

func TestHTTPX(t *testing.T) {
	eachMode(t, "httpx", withBearer, func(u *user) {
		u.write("/srv/client.py", 0o644, []byte(`
import sys, httpx
for http2 in (False, True):
    with httpx.Client(http2=http2) as c:
        r = c.get(sys.argv[1], params={"a": "b"})
        print(r.http_version, r.json()["uri"])
        print(len(c.put(sys.argv[1], content=iter([b"x" * 500, b"x" * 500])).json()["body"]))`))
		u.prints("HTTP/1.1 /client/?a=b\n1000\nHTTP/2 /client/?a=b\n1000", "python3 /srv/client.py "+u.url("/client/"))
	}, withClients)
}

func TestPip(t *testing.T) {
	eachMode(t, "pypi", withBearer, func(u *user) {
		u.prints("dozing from the index", "cd /srv && python3 -m venv v && v/bin/pip install -q --no-cache-dir --disable-pip-version-check --index-url "+u.url("/simple")+" dozing && v/bin/python -c 'import dozing; print(dozing.name)'")
	})
}

func TestNode(t *testing.T) {
	eachMode(t, "node", withBearer, func(u *user) {
		u.write("/srv/fetch.mjs", 0o644, []byte(`
const url = process.argv[2];
console.log((await (await fetch(url + "?a=b")).json()).uri);
const stream = new ReadableStream({ start(c) { for (let i = 0; i < 10; i++) c.enqueue(new TextEncoder().encode("x".repeat(100))); c.close(); } });
console.log((await (await fetch(url, { method: "POST", body: stream, duplex: "half" })).json()).body.length);`))
		u.write("/srv/https.mjs", 0o644, []byte(`
import https from "node:https";
const url = process.argv[2];
const send = (path, body) => new Promise((done, fail) => {
	const req = https.request(url + path, { method: body ? "POST" : "GET" }, (resp) => {
		let text = "";
		resp.on("data", (d) => (text += d)).on("end", () => done(JSON.parse(text))).on("error", fail);
	});
	req.on("error", fail).end(body);
});
console.log((await send("?a=b")).uri);
console.log((await send("", "x".repeat(1000))).body.length);`))
		for _, program := range []string{"fetch", "https"} {
			u.prints("/client/?a=b\n1000", "node /srv/"+program+".mjs "+u.url("/client/"))
		}
	})
}

func TestNPM(t *testing.T) {
	eachMode(t, "npm", withBearer, func(u *user) {
		u.prints("dozing from npm", "mkdir /srv/app && cd /srv/app && echo registry="+u.url("/")+" >.npmrc && npm init -y >/dev/null && npm install --silent dozing >/dev/null && node -p 'require(\"dozing\")'")
	})
}

func TestOpenSSL(t *testing.T) {
	eachMode(t, "openssl", withBearer, func(u *user) {
		// OpenSSL fails where a connection ends without close_notify, as Go does not.
		out := u.does(`printf 'GET /until-closed HTTP/1.0\r\nHost: ` + u.host + `\r\n\r\n' | openssl s_client -connect ` + u.host + `:443 -servername ` + u.host + ` -verify_hostname ` + u.host + ` -verify_return_error -quiet 2>&1`)
		if !strings.Contains(out, "200 OK") || !strings.HasSuffix(out, "to the end") || strings.Contains(out, "unexpected eof") {
			u.t.Errorf("got %q", out)
		}
	})
}

func TestJava(t *testing.T) {
	eachMode(t, "java", withBearer, func(u *user) {
		if u.zone == "pass" {
			u.does("keytool -importcert -cacerts -storepass changeit -noprompt -alias private -file " + privateCA)
		}
		u.write("/srv/Get.java", 0o644, []byte(`
import java.net.URI;
import java.net.http.*;
import javax.net.ssl.HttpsURLConnection;

class Get {
	public static void main(String[] args) throws Exception {
		var url = URI.create(args[0]);
		var resp = HttpClient.newHttpClient().send(HttpRequest.newBuilder(url).POST(HttpRequest.BodyPublishers.ofString("hello")).build(), HttpResponse.BodyHandlers.ofString());
		System.out.println(resp.version() + " " + resp.body().contains("\"body\":\"hello\""));
		var old = (HttpsURLConnection) url.toURL().openConnection();
		System.out.println(old.getResponseCode() + " " + new String(old.getInputStream().readAllBytes()).contains("\"proto\""));
	}
}`))
		u.prints("HTTP_2 true\n200 true", "java /srv/Get.java "+u.url("/client/"))
	}, withClients)
}

// goClient puts the test's client, which is written in Go, into the sandbox as /srv/client.
func (b *box) goClient() *box {
	b.t.Helper()
	f, err := os.Open(b.node.Program("client"))
	if err != nil {
		b.t.Fatal(err)
	}
	defer f.Close()
	b.put("/srv/client", f)
	return b
}

// TestGo has one client for all that a library does and a command line does not.
func TestGo(t *testing.T) {
	for _, c := range []struct{ command, host, server string }{
		{"get", "go", "https://%s/client/"},
		{"events", "events", "https://%s/events"},
		{"trailers", "trailers", "https://%s/trailers"},
		{"reuse", "reuse", "https://%s/client/"},
		{"many", "many", "https://%s/client/"},
		{"grpc", "calls", "%s:443"},
	} {
		t.Run(c.command, func(t *testing.T) {
			eachMode(t, c.host, withBearer, func(u *user) {
				u.goClient()
				u.does("/srv/client " + c.command + " " + fmt.Sprintf(c.server, u.host))
			})
		})
	}
}

// The node has to read messages in which a secret may come back, so they are not
// compressed then.
func TestWebSocket(t *testing.T) {
	const compressed = "echo permessage-deflate"
	eachMode(t, "websocket", withBearer, func(u *user) {
		u.goClient()
		want := map[string]string{"look": "echo", "pass": compressed}[u.zone]
		u.prints(want, "/srv/client websocket "+u.url("/websocket"))
		if u.zone != "look" {
			return
		}
		flows := u.flows(client.FlowFilter{Host: u.host})
		if len(flows) != 1 || flows[0].Status != 101 || flows[0].BytesIn < 1<<20 || flows[0].BytesOut < 1<<20 {
			u.t.Errorf("the audit log has %+v", flows)
		}
	})
	t.Run("intercepted without a secret", func(t *testing.T) {
		b := commonNode(t).newBox(t)
		u := &user{box: b, host: "open-websocket.look.test"}
		u.goClient()
		u.prints(compressed, "/srv/client websocket "+u.url("/open/websocket"))
	})
}

// A gigabyte comes down and goes up again at the same time, with the node searching
// the download for the secret.
func TestGigabyteStreamsInBoundedMemory(t *testing.T) {
	const size = 1 << 30
	want := received{Size: size, SHA256: blobDigest(size), Length: -1}
	eachMode(t, "gigabyte", withBearer, func(u *user) {
		flags := []string{"--http1.1", "--http2"}
		if u.zone == "pass" {
			flags = flags[:1] // the node does not know what passes through
		}
		for _, flag := range flags {
			u.node.StaysSmall(u.t, func() {
				got := u.digested(fmt.Sprintf("curl -sSf %[1]s '%[2]s' | curl -sSf %[1]s -T - %[3]s", flag, u.url(fmt.Sprint("/blob?size=", size)), u.url("/digest")))
				if got.Expect = ""; got != want {
					u.t.Errorf("%s: the server got %+v", flag, got)
				}
			})
		}
		for _, f := range u.flows(client.FlowFilter{Host: u.host}) {
			u.t.Logf("%s %s: %.0f MB/s", f.Method, f.Path, float64(f.BytesIn+f.BytesOut)/1000/f.DurationMS)
		}
	})
}
