package intercept

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"slices"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/doze-run/doze/egress/network/dial"
	"github.com/doze-run/doze/problem"
)

// echo is a service with one bidirectional streaming method.
var echo = grpc.ServiceDesc{
	ServiceName: "test.Echo",
	HandlerType: (*any)(nil),
	Streams: []grpc.StreamDesc{{StreamName: "Chat", ServerStreams: true, ClientStreams: true, Handler: func(_ any, s grpc.ServerStream) error {
		s.SetTrailer(metadata.Pairs("x-sum", "42", "x-raw-bin", "\x00\xff"))
		for {
			m := new(wrapperspb.StringValue)
			switch err := s.RecvMsg(m); {
			case err == io.EOF:
				return status.Error(codes.DataLoss, "the end: ö%")
			case err != nil:
				return err
			}
			if err := s.SendMsg(m); err != nil {
				return err
			}
		}
	}}},
}

func TestGRPC(t *testing.T) {
	for name, options := range map[string][]option{"untouched": nil, "filtered": {filtered(mask{})}, "plain": {withoutTLS}} {
		t.Run(name, func(t *testing.T) {
			s := grpc.NewServer()
			s.RegisterService(&echo, nil)
			r := start(t, s, options...)
			creds := credentials.NewTLS(&tls.Config{RootCAs: r.trust})
			if name == "plain" {
				creds = insecure.NewCredentials()
			}
			c, err := grpc.NewClient("passthrough:///"+host, grpc.WithTransportCredentials(creds), grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "tcp", r.addr)
			}))
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			stream, err := c.NewStream(t.Context(), &echo.Streams[0], "/test.Echo/Chat")
			if err != nil {
				t.Fatal(err)
			}
			for _, text := range []string{"one", "a " + secret, "three"} {
				if err := stream.SendMsg(wrapperspb.String(text)); err != nil {
					t.Fatal(err)
				}
				m := new(wrapperspb.StringValue)
				want := text
				if name == "filtered" {
					want = mask{}.Text(text)
				}
				if err := stream.RecvMsg(m); err != nil || m.Value != want {
					t.Fatalf("%q, %v", m.Value, err)
				}
			}
			stream.CloseSend()
			err = stream.RecvMsg(new(wrapperspb.StringValue))
			if status.Code(err) != codes.DataLoss || status.Convert(err).Message() != "the end: ö%" {
				t.Errorf("ended with %v", err)
			}
			if tr := stream.Trailer(); tr.Get("x-sum")[0] != "42" || tr.Get("x-raw-bin")[0] != "\x00\xff" {
				t.Errorf("trailers %v", tr)
			}
			// A trailers-only response.
			if err := c.Invoke(t.Context(), "/test.Echo/Unknown", wrapperspb.String(""), new(wrapperspb.StringValue)); status.Code(err) != codes.Unimplemented {
				t.Errorf("unknown method: %v", err)
			}
		})
	}
}

func TestGRPCClientGetsTheRefusal(t *testing.T) {
	r := start(t, grpc.NewServer(), func(_ *rig, _ *Destination, c *UpstreamConfig) {
		c.Dial = func(context.Context, dial.Target) (net.Conn, error) {
			return nil, &Failure{Code: problem.EgressDenied, Reason: "it is private", Denied: true}
		}
	})
	c, err := grpc.NewClient("passthrough:///"+host, grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: r.trust})), grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", r.addr)
	}))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var header, trailer metadata.MD
	err = c.Invoke(t.Context(), "/test.Echo/Chat", wrapperspb.String(""), new(wrapperspb.StringValue), grpc.Header(&header), grpc.Trailer(&trailer))
	if status.Code(err) != codes.PermissionDenied || status.Convert(err).Message() != "it is private (flow f1)" {
		t.Errorf("%v", err)
	}
	// gRPC treats the header of a response without messages as trailers.
	if all := metadata.Join(header, trailer); !slices.Equal(all.Get(problem.HeaderError), []string{"egress_denied"}) || !slices.Equal(all.Get(problem.HeaderFlow), []string{"f1"}) {
		t.Errorf("header %v, trailer %v", header, trailer)
	}
}
