//go:build integration

package e2e

import (
	"context"
	"log/slog"
	"net"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/runtime/jupyter"
	"github.com/doze-run/doze/runtime/jupyter/jupytertest"
	"github.com/doze-run/doze/runtime/netns"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

func TestPythonKernelConforms(t *testing.T) {
	conforms(t, "python", []string{"python3", "-m", "ipykernel_launcher", "-f"}, jupytertest.Code{
		Value: "1 + 1", Print: "import sys; print('out'); print('err', file=sys.stderr)", Set: "x = 7", Get: "x",
		Raise: "class Error(Exception): pass\nraise Error('broken')", Error: "Error",
		Interrupt: "KeyboardInterrupt", Loop: "print('on', flush=True)\nwhile True: pass", Flood: "for _ in range(512): print('x' * 8191)",
		Display: "from IPython.display import HTML; HTML('<b>rich</b>')",
	})
}

func TestDenoKernelConforms(t *testing.T) {
	conforms(t, "node", []string{"deno", "jupyter", "--kernel", "--conn"}, jupytertest.Code{
		Value: "1 + 1", Print: `console.log("out"); console.error("err")`, Set: "const x: number = 7", Get: "x",
		Raise: `throw Object.assign(new Error("broken"), { name: "Error" })`, Error: "Error",
		Interrupt: "Interrupted", Loop: `console.log("on"); while (true) {}`, Flood: `for (let i = 0; i < 512; i++) console.log("x".repeat(8191))`,
		Display: `({ [Symbol.for("Jupyter.display")]: () => ({ "text/html": "<b>rich</b>" }) })`,
		Flush:   jupyter.FlushDeno,
	})
}

// conforms runs the suite on kernels in a sandbox, which argv and the path of a connection file
// start.
func conforms(t *testing.T, imageName string, argv []string, code jupytertest.Code) {
	n := commonNode(t)
	b := n.newBox(t, image(imageName))
	b.exec("true")
	network, err := netns.Open(netns.Config{Helper: n.Program("doze-netns"), Cgroup: "", Log: slog.New(slog.DiscardHandler)})
	b.must(err)
	t.Cleanup(func() { network.Close() })
	pid := b.hostPID()
	ports := jupyter.Ports{Shell: 50000, IOPub: 50001, Stdin: 50002, Control: 50003, Heartbeat: 50004}
	jupytertest.Run(t, code, func(t *testing.T) *jupyter.Kernel {
		c := jupyter.NewConnection(ports)
		b.write("/tmp/kernel.json", c.File())
		p, err := n.API.StartProcess(testkit.Context(t), b.id, types.StartProcessRequest{
			Command: types.Command{Argv: append(argv[:len(argv):len(argv)], "/tmp/kernel.json"), Env: map[string]string{"NO_COLOR": "1"}},
		})
		testkit.NoError(t, "StartProcess", err)
		t.Cleanup(func() {
			_, err := n.API.StopProcess(testkit.Context(t), b.id, p.ID, "")
			testkit.NoError(t, "StopProcess", err)
		})
		return jupytertest.ConnectBy(t, c, func(ctx context.Context, port uint16) (net.Conn, error) {
			return network.Dial(ctx, sandbox.ID(b.id), pid, port)
		})
	})
}
