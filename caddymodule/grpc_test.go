package caddymodule

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	testgrpc "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/status"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/test/egress/rpc"
	"github.com/doze-run/doze/testkit"
)

// grpcServer serves the service of package rpc in a sandbox and returns a client of
// its preview.
func (s *site) grpcServer(protocol sandbox.Protocol) (sandbox.Sandbox, *grpc.ClientConn) {
	s.t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		s.t.Fatal(err)
	}
	server := grpc.NewServer()
	rpc.Serve(server)
	served := make(chan error, 1)
	go func() { served <- server.Serve(ln) }()
	s.t.Cleanup(func() {
		server.Stop()
		if err := <-served; err != nil {
			s.t.Error(err)
		}
	})
	sb, address := s.sandboxAt(sandbox.Port{Port: uint16(ln.Addr().(*net.TCPAddr).Port), Protocol: protocol})
	preview, err := url.Parse(address)
	if err != nil {
		s.t.Fatal(err)
	}
	client, err := grpc.NewClient("passthrough:///"+preview.Host,
		grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{InsecureSkipVerify: true})), // the CA is the test's own
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port)))
		}))
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { client.Close() })
	return sb, client
}

func TestGRPCThroughAPreview(t *testing.T) {
	s := newSite(t)
	for _, protocol := range []sandbox.Protocol{sandbox.ProtocolAuto, sandbox.ProtocolH2C} {
		sb, client := s.grpcServer(protocol)
		t.Run(string(protocol), func(t *testing.T) {
			rpc.Calls(t.Context(), client)
			testkit.Eventually(t, "it sleeps", func() bool { _, err := s.Manager.Sleep(t.Context(), sb.ID); return err == nil })
			rpc.Calls(t.Context(), client)
			testkit.Eventually(t, "it stops", func() bool { _, err := s.Manager.Stop(t.Context(), sb.ID); return err == nil })
			rpc.Calls(t.Context(), client)
			if got := s.get(sb.ID).State; got != sandbox.StateRunning {
				t.Errorf("after its calls it is %s", got)
			}
		})
	}
}

func TestGRPCToAServerThatDoesNotListenIsUnavailable(t *testing.T) {
	s := newSite(t)
	sb, client := s.grpcServer(sandbox.ProtocolAuto)
	if err := s.Manager.Unexpose(t.Context(), sb.ID, sb.Ports[0].Port); err != nil {
		t.Fatal(err)
	}
	_, err := testgrpc.NewTestServiceClient(client).EmptyCall(t.Context(), &testgrpc.Empty{})
	if code := status.Code(err); code != codes.Unimplemented { // gRPC's word for 404
		t.Errorf("a preview that does not exist: %v", err)
	}
}

// h2cOnly is a server that speaks HTTP/2 without TLS and nothing else.
func h2cOnly(t *testing.T) uint16 {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		w.Header().Set("Trailer", "End")
		io.WriteString(w, r.Proto+" "+string(body))
		w.Header().Set("End", "reached")
	})
	t.Cleanup(func() { ln.Close() })
	go func() { // ends with the listener
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			// It sends its SETTINGS before it reads anything.
			go new(http2.Server).ServeConn(conn, &http2.ServeConnOpts{Handler: handler})
		}
	}()
	return uint16(ln.Addr().(*net.TCPAddr).Port)
}

func TestServersOfHTTP2WithoutTLS(t *testing.T) {
	s := newSite(t)
	send := func(address, method, body string) (int, string, http.Header) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), method, address, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		res := s.do(s.client(true), req)
		return res.StatusCode, testkit.Body(t, res), res.Trailer
	}
	for _, protocol := range []sandbox.Protocol{sandbox.ProtocolAuto, sandbox.ProtocolH2C} {
		_, address := s.sandboxAt(sandbox.Port{Port: h2cOnly(t), Protocol: protocol})
		for _, method := range []string{"GET", "POST"} {
			if status, got, trailer := send(address, method, strings.Repeat("x", len(method)-3)); status != 200 || got != "HTTP/2.0 "+strings.Repeat("x", len(method)-3) || trailer.Get("End") != "reached" {
				t.Errorf("%s %s: %d %q, trailers %v", protocol, method, status, got, trailer)
			}
		}
	}
	_, address := s.sandboxAt(sandbox.Port{Port: h2cOnly(t), Protocol: sandbox.ProtocolAuto})
	if status, got, _ := send(address, "POST", "first"); status != 502 || !strings.Contains(got, "server_protocol_mismatch") {
		t.Errorf("a POST that comes first: %d %q", status, got)
	}
	if status, got, _ := send(address, "POST", "second"); status != 200 || got != "HTTP/2.0 second" {
		t.Errorf("the second POST: %d %q", status, got)
	}
	_, address = s.sandboxAt(sandbox.Port{Port: h2cOnly(t), Protocol: sandbox.ProtocolHTTP1})
	for range 2 {
		if status, got, _ := send(address, "GET", ""); status != 502 || !strings.Contains(got, "server_protocol_mismatch") {
			t.Errorf("with protocol http1: %d %q", status, got)
		}
	}
}
