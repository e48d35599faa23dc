package main

import (
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/testkit"
)

func TestWaitPrintsWhyAProcessIsReady(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	out := r.ok("exec", "-d", "--name", "web", "--ready", "log=^up", "a", "--", "sh", "-c", "echo up and running; exec sleep 1000")
	if !regexp.MustCompile(`^p-\w{8}  web\n$`).MatchString(out) {
		t.Errorf("exec printed %q", out)
	}
	if out := r.ok("wait", "a", "web", "log=up (.*)"); !strings.HasSuffix(out, "  web  up and running\n") {
		t.Errorf("wait printed %q", out)
	}
	ready := decodeJSON[types.ReadyProcess](t, r.ok("wait", "a", "web", "log=up (.*)", "--json"))
	if fmt.Sprint(ready.Match) != "[up and running and running]" {
		t.Errorf("got %+v", ready)
	}
	r.ok("kill", "a", "web")
	if out := r.ok("wait", "a", "web", "exit"); !strings.HasSuffix(out, "  web  exited (SIGTERM)\n") {
		t.Errorf("wait printed %q", out)
	}
}

func TestWaitPrintsTheLastLinesOfAProcessThatIsNotReady(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	for want, args := range map[string][]string{
		"process_exited: process web exited with code 3 before it was ready":   {"exec", "-d", "--name", "web", "--ready", "http=1/health", "a", "--", "sh", "-c", "echo compiling; echo no module; exit 3"},
		"process_not_ready: process slow is not ready after 20ms: nothing lis": {"exec", "-d", "--name", "slow", "--ready", "port=1", "--ready-timeout", "20ms", "a", "--", "sh", "-c", "echo compiling; echo no module; exec sleep 1000"},
	} {
		got := r.doze(args...)
		if got.code == 0 || !strings.HasPrefix(got.err, "doze: "+want) || !strings.Contains(got.err, ":\n    compiling\n    no module\n") {
			t.Errorf("%v: code %d, %q", args, got.code, got.err)
		}
	}
}

func TestConditionsAreParsed(t *testing.T) {
	for text, want := range map[string]string{
		"port=3000":                `{Port:3000}`,
		"log=a=b ready":            `{Log:a=b ready}`,
		"exit":                     `{Exit:true}`,
		"http=3000":                `{HTTP:{Port:3000}}`,
		"http=3000/":               `{HTTP:{Port:3000 Path:/}}`,
		"http=3000/health?a=b":     `{HTTP:{Port:3000 Path:/health?a=b}}`,
		"http=3000/health?a=204":   `{HTTP:{Port:3000 Path:/health?a Status:204}}`,
		"http=3000/health?a=b=3xx": `{HTTP:{Port:3000 Path:/health?a=b Status:3xx}}`,
		"http=3000=204":            `{HTTP:{Port:3000 Status:204}}`,
		"port=0":                   "invalid port",
		"port=70000":               "invalid port",
		"http=/health":             "invalid port",
		"log=":                     "unknown condition",
		"ready":                    "unknown condition",
		"":                         "use port=3000",
		"http=3000/=999":           `{HTTP:{Port:3000 Path:/=999}}`,
	} {
		c, err := parseReady(text, time.Second)
		if err != nil {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%q: %v", text, err)
			}
			continue
		}
		var parts []string
		add := func(set bool, format string, v any) {
			if set {
				parts = append(parts, fmt.Sprintf(format, v))
			}
		}
		add(c.Port != 0, "Port:%d", c.Port)
		add(c.Log != "", "Log:%s", c.Log)
		add(c.Exit, "Exit:%t", c.Exit)
		if h := c.HTTP; h != nil {
			http := fmt.Sprintf("HTTP:{Port:%d", h.Port)
			if h.Path != "" {
				http += " Path:" + h.Path
			}
			if h.Status != "" {
				http += " Status:" + h.Status
			}
			parts = append(parts, http+"}")
		}
		if got := "{" + strings.Join(parts, " ") + "}"; got != want || time.Duration(c.Timeout) != time.Second {
			t.Errorf("%q is %s, want %s", text, got, want)
		}
	}
	r := newRig(t)
	for want, args := range map[string][]string{
		"negative":                       {"wait", "a", "web", "exit", "--timeout", "-1s"},
		"add -d":                         {"exec", "--ready", "exit", "a", "--", "true"},
		"--ready-timeout is for --ready": {"exec", "-d", "--ready-timeout", "1s", "a", "--", "true"},
		"CONDITION is missing":           {"wait", "a", "web"},
	} {
		if got := r.doze(args...); got.code == 0 || got.out != "" || !strings.Contains(got.err, want) {
			t.Errorf("%v: %+v", args, got)
		}
	}
}

func TestPortsMergesServersAndPreviews(t *testing.T) {
	r := newRig(t)
	r.node.Engine.HandleGuest(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		switch req.URL.Path {
		case guest.RouteHello:
			fmt.Fprintf(w, `{"protocol":%d}`, guest.ProtocolVersion)
		case guest.RouteEvents:
			fmt.Fprintln(w, `{"type":"ports","ports":[{"port":3000,"addresses":["127.0.0.1","::1"],"pid":7,"program":"node","process":"p-aaaaaaaa"},{"port":5432,"addresses":["::"]}]}`)
			http.NewResponseController(w).Flush()
			<-req.Context().Done()
		}
	}))
	r.ok("create", "a")
	r.ok("expose", "a", "3000")
	r.ok("expose", "a", "80")
	var out string
	testkit.Eventually(t, "the ports are known", func() bool {
		out = r.ok("ports", "a")
		return strings.Contains(out, "5432")
	})
	golden(t, "ports", regexp.MustCompile(`https://\S+`).ReplaceAllString(out, "https://…"))
	list := decodeJSON[types.PortList](t, r.ok("ports", "a", "--json"))
	if len(list.Ports) != 2 || len(list.Listening) != 2 {
		t.Errorf("got %+v", list)
	}
}
