package main

import (
	"context"
	"fmt"
	"io"
	"log"
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
	return newServer(http.HandlerFunc(servePage)).Serve(l)
}

func servePage(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/octet-stream")
	_, _ = w.Write(smallPage)
}

func newServer(h http.Handler) *http.Server {
	// Clients that leave are not worth a line.
	return &http.Server{Handler: h, ReadHeaderTimeout: time.Minute, ErrorLog: log.New(io.Discard, "", 0)}
}

// create makes a sandbox that falls asleep by itself after that time; 0 is never.
func (n *node) create(ctx context.Context, name string, sleepAfter time.Duration) (id string, err error) {
	sb, _, err := n.API.Create(ctx, types.CreateSandboxRequest{Name: name, SleepAfter: new(types.Duration(sleepAfter))})
	return sb.ID, err
}

// withServer makes a sandbox in which the small server runs, declared on_wake,
// and returns its preview URL.
func (n *node) withServer(ctx context.Context, name string) (id, url string, err error) {
	if id, err = n.withProgram(ctx, name); err != nil {
		return id, "", err
	}
	_, err = n.API.StartProcess(ctx, id, types.StartProcessRequest{
		Command: types.Command{Argv: []string{sandboxProgram, "serve", fmt.Sprint("127.0.0.1:", serverPort)}}, Name: "server", Restart: types.RestartOnWake,
	})
	if err != nil {
		return id, "", err
	}
	port, err := n.API.Expose(ctx, id, types.ExposePortRequest{Port: serverPort})
	if err != nil {
		return id, "", err
	}
	return id, port.URL, n.awaitResponse(ctx, port.URL)
}

// exec runs a command to its end.
func (n *node) exec(ctx context.Context, id string, argv ...string) error {
	result, err := n.API.Exec(ctx, id, client.ExecRequest{Command: types.Command{Argv: argv}})
	if err == nil && result.ExitCode != 0 {
		err = fmt.Errorf("%v failed: %q", argv, result.Stderr)
	}
	return err
}
