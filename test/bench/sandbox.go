package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
)

// serverPort is where the small server listens in a sandbox.
const serverPort = 3000

// smallPage is the response of the small server.
var smallPage = make([]byte, 1024)

// serve is the small server of the figures: this program, in a sandbox and
// outside of one.
func serve(addr string) error {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	server := &http.Server{
		ReadHeaderTimeout: time.Minute,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/octet-stream")
			w.Write(smallPage)
		}),
	}
	return server.Serve(l)
}

// create makes a sandbox that falls asleep by itself after that time; 0 is never.
func (n *node) create(ctx context.Context, name string, sleepAfter time.Duration) (types.Sandbox, error) {
	after := types.Duration(sleepAfter)
	sb, _, err := n.API.Create(ctx, types.CreateSandboxRequest{Name: name, SleepAfter: &after})
	return sb, err
}

// withServer makes a sandbox in which the small server runs, declared on_wake,
// and returns its preview URL.
func (n *node) withServer(ctx context.Context, name string) (sb types.Sandbox, url string, err error) {
	if sb, err = n.withProgram(ctx, name); err != nil {
		return sb, "", err
	}
	_, err = n.API.StartProcess(ctx, sb.ID, types.StartProcessRequest{
		Command: types.Command{Argv: []string{sandboxProgram, "serve", fmt.Sprint("127.0.0.1:", serverPort)}}, Name: "server", Restart: types.RestartOnWake,
	})
	if err != nil {
		return sb, "", err
	}
	port, err := n.API.Expose(ctx, sb.ID, types.ExposePortRequest{Port: serverPort})
	if err != nil {
		return sb, "", err
	}
	return sb, port.URL, n.awaitResponse(ctx, port.URL)
}

// exec runs a command to its end.
func (n *node) exec(ctx context.Context, id string, argv ...string) error {
	result, err := n.API.Exec(ctx, id, client.ExecRequest{Command: types.Command{Argv: argv}})
	if err == nil && result.ExitCode != 0 {
		err = fmt.Errorf("%v failed: %q", argv, result.Stderr)
	}
	return err
}
