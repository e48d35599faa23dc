//go:build integration

package e2e

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/testkit"
)

// run executes code in a context.
func (b *box) run(name, code string) types.CodeResult {
	b.t.Helper()
	r, err := b.node.API.RunCode(testkit.Context(b.t), b.id, client.RunCodeRequest{Context: name, Code: code})
	if err != nil {
		b.t.Fatalf("%s: %v", code, err)
	}
	return r
}

// value executes code and returns the text of the value of its last expression.
func (b *box) value(name, code string) string {
	b.t.Helper()
	r := b.run(name, code)
	if r.Error != nil {
		b.t.Errorf("%s: %+v", code, *r.Error)
	}
	for _, v := range r.Results {
		if v.Main {
			return v.Data["text/plain"].(string)
		}
	}
	b.t.Errorf("%s: no value in %+v", code, r)
	return ""
}

// begin executes code that prints "on", and returns when it has. The channel gets the result.
func (b *box) begin(ctx context.Context, name, code string) <-chan types.CodeResult {
	b.t.Helper()
	on, result := make(chan struct{}), make(chan types.CodeResult, 1)
	go func() {
		defer close(result)
		var r types.CodeResult
		end, err := b.node.API.RunCodeStream(ctx, b.id, client.RunCodeRequest{Context: name, Code: code}, client.CodeEvents{
			Stdout: func(data []byte) error {
				if r.Stdout == "" {
					close(on)
				}
				r.Stdout += string(data)
				return nil
			},
			Error:  func(e types.CodeError) error { r.Error = &e; return nil },
			Result: func(v types.CodeValue) error { r.Results = append(r.Results, v); return nil },
		})
		if err != nil {
			if ctx.Err() == nil {
				b.t.Error(err)
			}
			return
		}
		r.CodeEnd = end
		result <- r
	}()
	testkit.Closed(b.t, "the code's first output", on)
	return result
}

// loop executes code that does not end by itself, and returns when it loops. The channel gets
// the error.
func (b *box) loop(name string) <-chan error {
	b.t.Helper()
	on, failed := make(chan struct{}), make(chan error, 1)
	begin := sync.OnceFunc(func() { close(on) }) // print writes its newline by itself
	go func() {
		_, err := b.node.API.RunCodeStream(testkit.Context(b.t), b.id, client.RunCodeRequest{Context: name, Code: "print('on', flush=True)\nwhile True: pass"},
			client.CodeEvents{Stdout: func([]byte) error { begin(); return nil }})
		failed <- err
	}()
	testkit.Closed(b.t, "the code's first output", on)
	return failed
}

func (b *box) wantContextLost(err error, detail string) {
	b.t.Helper()
	if p, ok := errors.AsType[*problem.Problem](err); !ok || p.Code != problem.ContextLost || p.Status != 410 || !strings.Contains(p.Detail, detail) {
		b.t.Errorf("error %v, want %s with %q", err, problem.ContextLost, detail)
	}
}

func TestPythonContext(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t, image("python"))
	t.Run("StatePersists", func(t *testing.T) {
		b.run("python", "import math\nx = 6")
		if got := b.value("python", "x * 7"); got != "42" {
			t.Errorf("got %s", got)
		}
		if got := b.value("python", "import asyncio\nawait asyncio.sleep(0.01, result=x)"); got != "6" {
			t.Errorf("await: %s", got)
		}
	})
	t.Run("PlotIsAPictureWithoutShow", func(t *testing.T) {
		r := b.run("python", "import matplotlib.pyplot as plt\nplt.plot([1, 2, 4])")
		var png string
		for _, v := range r.Results {
			if data, ok := v.Data["image/png"].(string); ok {
				png = data
			}
		}
		if b, err := base64.StdEncoding.DecodeString(png); err != nil || !strings.HasPrefix(string(b), "\x89PNG") {
			t.Errorf("no picture in %+v, %v", r, err)
		}
		r = b.run("python", "%config InlineBackend.figure_formats = ['svg']\nplt.plot([1, 2]); None")
		if len(r.Results) != 1 || !strings.Contains(r.Results[0].Data["image/svg+xml"].(string), "<svg") {
			t.Errorf("no SVG in %+v", r)
		}
	})
	t.Run("PlotHasItsData", func(t *testing.T) {
		const form = "application/vnd.doze.chart+json"
		for code, want := range map[string]string{
			"plt.plot([1, 2], [3, float('nan')], label='cost'); plt.title('T'); plt.xlabel('x')": `{"axes":[{"series":[{"kind":"line","label":"cost","points":[[1,3],[2,null]]}],"title":"T","x_label":"x","x_scale":"linear","y_label":"","y_scale":"linear"}],"title":"","truncated":false}`,
			"plt.bar(['a', 'b'], [1, 2])":                                       `[{"kind":"bar","label":null,"points":[["a",1],["b",2]]}]`,
			"plt.barh(['a', 'b'], [1, 2])":                                      `[{"kind":"bar","label":null,"points":[[1,"a"],[2,"b"]]}]`,
			"import pandas; pandas.Series([5, 6], index=['p', 'q']).plot.bar()": `[{"kind":"bar","label":null,"points":[["p",5],["q",6]]}]`,
			"plt.scatter([1], [2]); plt.yscale('log')":                          `"series":[{"kind":"scatter","label":null,"points":[[1,2]]}],"title":"","x_label":"","x_scale":"linear","y_label":"","y_scale":"log"`,
			"plt.pie([1, 3], labels=['u', 'v'])":                                `[{"kind":"pie","label":null,"points":[["u",0.25],["v",0.75]]}]`,
			"import datetime; plt.plot([datetime.date(2026, 1, 2)], [1])":       `[{"kind":"line","label":null,"points":[["2026-01-02",1]]}]`,
			"plt.plot(range(9000))":                                             `[4999,4999]]}],"title":"","x_label":"","x_scale":"linear","y_label":"","y_scale":"linear"}],"title":"","truncated":true}`,
		} {
			r := b.run("python", "import matplotlib.pyplot as plt\n"+code+"; None")
			if len(r.Results) != 1 {
				t.Errorf("%s: %d results", code, len(r.Results))
				continue
			}
			got, err := json.Marshal(r.Results[0].Data[form])
			if err != nil || !strings.Contains(string(got), want) {
				t.Errorf("%s: got %.400s, error %v; want %s", code, got, err, want)
			}
		}
		r := b.run("python", "plt.imshow([[1, 2]]); None") // has no series
		if _, ok := r.Results[0].Data[form]; ok {
			t.Errorf("got %+v", r.Results[0].Data[form])
		}
	})
	t.Run("ValueHasEveryForm", func(t *testing.T) {
		r := b.run("python", "import pandas\npandas.DataFrame({'a': [7]})")
		if len(r.Results) != 1 || !strings.Contains(r.Results[0].Data["text/html"].(string), "<td>7</td>") || !strings.Contains(r.Results[0].Data["text/plain"].(string), "7") {
			t.Errorf("got %+v", r)
		}
		r = b.run("python", "from IPython.display import *\ndisplay(JSON({'a': [1]}), Markdown('**m**'), Latex('$x$'))")
		forms := map[string]any{}
		for _, v := range r.Results {
			for mime, data := range v.Data {
				forms[mime] = data
			}
		}
		if object, _ := forms["application/json"].(map[string]any); object["a"] == nil || forms["text/markdown"] != "**m**" || forms["text/latex"] != "$x$" {
			t.Errorf("got %+v", forms)
		}
	})
	t.Run("ExceptionHasItsTraceback", func(t *testing.T) {
		r := b.run("python", "def f():\n    return 1 / 0\nf()")
		if e := r.Error; e == nil || e.Name != "ZeroDivisionError" || e.Message != "division by zero" || !strings.Contains(strings.Join(e.Traceback, "\n"), "return 1 / 0") {
			t.Errorf("got %+v", r)
		}
	})
	t.Run("ClearedOutputIsNotReturned", func(t *testing.T) {
		r := b.run("python", "from IPython.display import clear_output\nfor i in range(3):\n    print(i)\n    clear_output(wait=True)\nprint('end')")
		if r.Stdout != "end\n" {
			t.Errorf("got %q", r.Stdout)
		}
	})
	t.Run("OutputOf100MBIsBounded", func(t *testing.T) {
		r := b.run("python", "for _ in range(100): print('x' * 1_000_000)\n'end'")
		if !r.Truncated || len(r.Stdout) > 4*mib || len(r.Stdout) < 3*mib || r.Error != nil {
			t.Errorf("%d bytes, truncated %v, %v", len(r.Stdout), r.Truncated, r.Error)
		}
		if got := b.value("python", "x"); got != "6" {
			t.Errorf("then %s", got)
		}
	})
	t.Run("StreamOf100MB", func(t *testing.T) {
		read := 0
		stream := func(code string, stdout func(n int)) types.CodeEnd {
			read = 0
			end, err := n.API.RunCodeStream(testkit.Context(t), b.id, client.RunCodeRequest{Context: "python", Code: code, MaxOutputBytes: mib},
				client.CodeEvents{Stdout: func(data []byte) error { read += len(data); stdout(read); return nil }})
			testkit.NoError(t, "RunCodeStream", err)
			return end
		}
		// The limit is of what its client has not read yet: the code waits for it.
		const paced, part = 16 * mib, mib / 2
		n.StaysSmall(t, func() {
			end := stream(fmt.Sprintf(`import os, time
for i in range(1, %d):
    print('x' * %d, flush=True)
    while not os.path.exists(f'/tmp/read-{i}'): time.sleep(0.001)`, paced/part+1, part-1), func(read int) {
				if read%part == 0 {
					b.write(fmt.Sprint("/tmp/read-", read/part), nil)
				}
			})
			if read != paced || end.Truncated {
				t.Errorf("read %d bytes of %d, %+v", read, paced, end)
			}
			// It does not wait, and may be faster than its client.
			const size = 100_000_000
			end = stream("for _ in range(100): print('x' * 999_999)", func(int) {})
			if read < mib/2 || read > size || end.Truncated != (read < size) {
				t.Errorf("read %d bytes of %d, %+v", read, size, end)
			}
		})
		if got := b.value("python", "x"); got != "6" {
			t.Errorf("then %s", got)
		}
	})
	t.Run("InterruptEndsALoop", func(t *testing.T) {
		result := b.begin(testkit.Context(t), "python", "print('on', flush=True)\nwhile True: pass")
		_, err := n.API.InterruptContext(testkit.Context(t), b.id, "python")
		testkit.NoError(t, "InterruptContext", err)
		if r := testkit.Receive(t, "the result", result); r.Error == nil || r.Error.Name != "KeyboardInterrupt" {
			t.Errorf("got %+v", r)
		}
		r, err := n.API.RunCode(testkit.Context(t), b.id, client.RunCodeRequest{Context: "python", Code: "import subprocess\nsubprocess.run(['sleep', '1000'])", Timeout: types.Duration(time.Second)})
		if err != nil || !r.TimedOut || r.Error == nil {
			t.Errorf("%+v, %v", r, err)
		}
		ctx, leave := context.WithCancel(testkit.Context(t))
		left := b.begin(ctx, "python", "print('on', flush=True)\nwhile True: pass")
		leave()
		<-left
		if got := b.value("python", "x"); got != "6" {
			t.Errorf("after the client has left: %s", got)
		}
	})
	t.Run("CodeGoesOnAfterSleep", func(t *testing.T) {
		result := b.begin(testkit.Context(t), "python", "import os, time\nprint('on', flush=True)\nwhile not os.path.exists('/tmp/go'): time.sleep(0.01)\nx + 1")
		_, err := n.API.ForceSleep(testkit.Context(t), b.id)
		testkit.NoError(t, "ForceSleep", err)
		if list, err := n.API.Contexts(testkit.Context(t), b.id); err != nil || len(list) != 1 || b.state() != types.StateAsleep {
			t.Errorf("contexts %+v, %v, in state %s", list, err, b.state())
		}
		b.exec("touch /tmp/go")
		if r := testkit.Receive(t, "the result", result); len(r.Results) != 1 || r.Results[0].Data["text/plain"] != "7" {
			t.Errorf("got %+v", r)
		}
	})
	t.Run("PortsOfTheInterpreterAreNotListed", func(t *testing.T) {
		b.run("python", "import socket\ns = socket.create_server(('127.0.0.1', 8123))")
		testkit.Eventually(t, "the port of the code is listed alone", func() bool {
			list, err := n.API.Ports(testkit.Context(t), b.id)
			return err == nil && len(list.Listening) == 1 && list.Listening[0].Port == 8123
		})
	})
	t.Run("KilledInterpreterIsReported", func(t *testing.T) {
		_, err := n.API.RunCode(testkit.Context(t), b.id, client.RunCodeRequest{Context: "python", Code: "import os\nos.kill(os.getpid(), 9)"})
		b.wantContextLost(err, "SIGKILL")
		_, err = n.API.RestartContext(testkit.Context(t), b.id, "python")
		testkit.NoError(t, "RestartContext", err)
		if r := b.run("python", "x"); r.Error == nil || r.Error.Name != "NameError" {
			t.Errorf("got %+v", r)
		}
	})
	t.Run("RestartEndsALoop", func(t *testing.T) {
		failed := b.loop("python")
		_, err := n.API.RestartContext(testkit.Context(t), b.id, "python")
		testkit.NoError(t, "RestartContext", err)
		b.wantContextLost(testkit.Receive(t, "the end of the code", failed), "the context python")
		if got := b.value("python", "6 * 7"); got != "42" {
			t.Errorf("then %s", got)
		}
	})
	t.Run("CloseEndsALoop", func(t *testing.T) {
		failed := b.loop("python")
		c, err := n.API.CloseContext(testkit.Context(t), b.id, "python")
		if err != nil || c.State != types.ProcessStateExited {
			t.Errorf("closed %+v, %v", c, err)
		}
		b.wantContextLost(testkit.Receive(t, "the end of the code", failed), "the context python")
		if list, err := n.API.Contexts(testkit.Context(t), b.id); err != nil || len(list) != 0 {
			t.Errorf("contexts %+v, %v", list, err)
		}
		if got := b.value("python", "6 * 7"); got != "42" { // a new one
			t.Errorf("then %s", got)
		}
	})
	t.Run("StopEndsTheContext", func(t *testing.T) {
		b.stop()
		_, err := n.API.RunCode(testkit.Context(t), b.id, client.RunCodeRequest{Context: "python", Code: "1"})
		b.wantContextLost(err, "requested")
		if b.state() != types.StateStopped {
			t.Error("the refused code started the sandbox")
		}
	})
}

// A killed node loses the output of the code that was executed. The interpreter goes on, and the
// next node waits for it.
func TestKilledNodeLeavesTheContext(t *testing.T) {
	n := ownNode(t)
	b := n.newBox(t, image("python"))
	b.run("python", "x = 7")
	execute := func(code string) (failed chan error) {
		on := make(chan struct{})
		failed = make(chan error, 1)
		go func() { // ends with the node
			_, err := n.API.RunCodeStream(testkit.Context(t), b.id, client.RunCodeRequest{Context: "python", Code: "print('on', flush=True)\n" + code},
				client.CodeEvents{Stdout: func([]byte) error { close(on); return nil }})
			failed <- err
		}()
		testkit.Closed(t, "the code's first output", on)
		return failed
	}
	restart := func(failed chan error) {
		b.must(n.Kill())
		if err := testkit.Receive(t, "the end of the stream", failed); err == nil {
			t.Error("the code of a killed node has ended")
		}
		b.must(n.Start())
	}
	restart(execute("import time\nfor _ in range(20): time.sleep(0.1)\ny = x + 1"))
	if got := b.value("python", "y"); got != "8" {
		t.Errorf("got %s", got)
	}
	restart(execute("while True: pass"))
	_, err := n.API.RunCode(testkit.Context(t), b.id, client.RunCodeRequest{Context: "python", Code: "y", Timeout: types.Duration(100 * time.Millisecond)})
	if !problem.Has(err, problem.ContextBusy) {
		t.Errorf("during the loop: %v", err)
	}
	_, err = n.API.InterruptContext(testkit.Context(t), b.id, "python")
	testkit.NoError(t, "InterruptContext", err)
	if got := b.value("python", "y"); got != "8" {
		t.Errorf("after the loop: %s", got)
	}
}

func TestJavaScriptContext(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t, image("node"))
	b.run("typescript", "const x: number = await Promise.resolve(6)")
	for code, want := range map[string]string{
		"x * 7": "42",
		`import { basename } from "node:path"; basename("/a/b")`: `"b"`,
		`require("os").platform()`:                               `"linux"`,
		`enum Color { Red = 3 }; Color.Red`:                      "3",
	} {
		if got := b.value("typescript", code); got != want {
			t.Errorf("%s: %s, want %s", code, got, want)
		}
	}
	// JavaScript is a context of its own, with the same.
	b.run("javascript", "const z = await Promise.resolve(6)")
	for code, want := range map[string]string{
		"z * 7": "42",
		"await new Promise((resolve) => setTimeout(() => resolve(z + 1), 1))": "7",
		`import { join } from "node:path"; join("a", "b")`:                    `"a/b"`,
		`(await import("node:path")).extname("c.js")`:                         `".js"`,
		`require("os").platform()`:                                            `"linux"`,
		`const { EOL } = require("node:os"); EOL.length`:                      "1",
	} {
		if got := b.value("javascript", code); got != want {
			t.Errorf("%s: %s, want %s", code, got, want)
		}
	}
	r := b.run("typescript", `console.log("out"); console.error("err"); throw new TypeError("broken")`)
	if r.Error == nil || r.Error.Name != "TypeError" || r.Error.Message != "broken" || r.Stdout != "out\n" || !strings.Contains(r.Stderr, "err") {
		t.Errorf("got %+v", r)
	}
	r = b.run("typescript", `({ [Symbol.for("Jupyter.display")]: () => ({ "text/html": "<b>rich</b>" }) })`)
	if len(r.Results) != 1 || r.Results[0].Data["text/html"] != "<b>rich</b>" {
		t.Errorf("got %+v", r)
	}
	r = b.run("javascript", `({ [Symbol.for("Jupyter.display")]: () => ({
		"image/svg+xml": "<svg xmlns='http://www.w3.org/2000/svg'\nwidth='1'></svg>\n", "application/json": { rows: [1, "two", null] }, "text/plain": "rich",
	}) })`)
	if len(r.Results) != 1 {
		t.Fatalf("got %+v", r)
	}
	testkit.Diff(t, "forms of a value", map[string]any{
		"image/svg+xml":    "<svg xmlns='http://www.w3.org/2000/svg'\nwidth='1'></svg>\n",
		"application/json": map[string]any{"rows": []any{1.0, "two", nil}}, "text/plain": "rich",
	}, r.Results[0].Data)
	r, err := n.API.RunCode(testkit.Context(t), b.id, client.RunCodeRequest{Context: "typescript", Code: "while (true) {}", Timeout: types.Duration(time.Second)})
	if err != nil || !r.TimedOut || r.Error == nil || r.Error.Name != "Interrupted" {
		t.Errorf("%+v, %v", r, err)
	}
	if got := b.value("typescript", "x"); got != "6" {
		t.Errorf("after the interrupt: %s", got)
	}
	if got := b.value("javascript", "globalThis.y = 2; typeof x + y"); got != `"undefined2"` {
		t.Errorf("in another context: %s", got)
	}
	// Packages come from node_modules of the context's working directory.
	b.write("/srv/shop/package.json", []byte(`{"dependencies": {"price": "^1.2.3"}}`))
	b.write("/srv/shop/node_modules/price/package.json", []byte(`{"name": "price", "version": "1.2.3", "main": "index.js"}`))
	b.write("/srv/shop/node_modules/price/index.js", []byte(`module.exports = { price: 45 }`))
	_, err = n.API.OpenContext(testkit.Context(t), b.id, types.OpenContextRequest{ID: "shop", Language: types.LanguageJavaScript, Cwd: "/srv/shop"})
	testkit.NoError(t, "OpenContext", err)
	for _, code := range []string{`require("price").price`, `(await import("price")).default.price`, `import shop from "price"; shop.price`} {
		if got := b.value("shop", code); got != "45" {
			t.Errorf("%s: %s", code, got)
		}
		if r := b.run("javascript", code); r.Error == nil {
			t.Errorf("%s in another directory: %+v", code, r)
		}
	}
	// Deno does not interrupt code that waits in an await: only a restart ends it.
	r, err = n.API.RunCode(testkit.Context(t), b.id, client.RunCodeRequest{Context: "javascript", Code: "await new Promise(() => {})", Timeout: types.Duration(100 * time.Millisecond)})
	if err != nil || !r.TimedOut {
		t.Errorf("%+v, %v", r, err)
	}
	_, err = n.API.RunCode(testkit.Context(t), b.id, client.RunCodeRequest{Context: "javascript", Code: "1", Timeout: types.Duration(100 * time.Millisecond)})
	if p, ok := errors.AsType[*problem.Problem](err); !ok || p.Code != problem.ContextBusy || p.Status != 409 {
		t.Errorf("during an await that does not end: %v", err)
	}
	_, err = n.API.RestartContext(testkit.Context(t), b.id, "javascript")
	testkit.NoError(t, "RestartContext", err)
	if got := b.value("javascript", "typeof z"); got != `"undefined"` {
		t.Errorf("after the restart: %s", got)
	}
	if got := b.value("typescript", "x"); got != "6" {
		t.Errorf("in the context that was not restarted: %s", got)
	}
	b.wantNoInterpreter("python", "doze/python")
}

func TestMissingInterpreterNamesItsImage(t *testing.T) {
	b := commonNode(t).newBox(t)
	for language, image := range map[string]string{"python": "doze/python", "javascript": "doze/node", "typescript": "doze/node"} {
		b.wantNoInterpreter(language, image)
	}
}

func (b *box) wantNoInterpreter(language, image string) {
	b.t.Helper()
	_, err := b.node.API.RunCode(testkit.Context(b.t), b.id, client.RunCodeRequest{Context: language, Code: "1"})
	if p, ok := errors.AsType[*problem.Problem](err); !ok || p.Code != problem.InterpreterNotInstalled || p.Status != 501 || !strings.Contains(p.Detail, image) {
		b.t.Errorf("%s without an interpreter: %v", language, err)
	}
}
