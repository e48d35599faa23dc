package types

import "time"

// Port is an exposed port. Its token is in the URL.
type Port struct {
	Port       uint16        `json:"port" doc:"TCP port inside the sandbox" example:"3000"`
	URL        string        `json:"url" format:"uri" doc:"URL of the preview"`
	Access     Access        `json:"access" doc:"Which clients can open the preview"`
	Wake       WakeMode      `json:"wake" doc:"Which requests wake the sandbox"`
	HostHeader HostHeader    `json:"host_header" doc:"Which Host header the server sees"`
	Protocol   Protocol      `json:"protocol" doc:"HTTP version that the server supports"`
	WebSocket  WebSocketMode `json:"websocket" doc:"Whether idle WebSockets keep the sandbox awake"`
	CreatedAt  time.Time     `json:"created_at" doc:"When the port was exposed"`
}

// Access is the kind of client that can open a preview.
type Access string

const (
	AccessToken  Access = "token"  // clients that know the token in the URL
	AccessPublic Access = "public" // clients that know the sandbox's id
)

// Values returns all values.
func (Access) Values() []Access { return []Access{AccessToken, AccessPublic} }

// WakeMode is which requests to a preview wake the sandbox.
type WakeMode string

const (
	WakeModeAny WakeMode = "any" // all
	// WakeModeNavigation: all requests except prefetches wake a sandbox that is asleep;
	// only opening a page, and programs, start one that is stopped.
	WakeModeNavigation WakeMode = "navigation"
	WakeModeNever      WakeMode = "never" // none
)

// Values returns all modes.
func (WakeMode) Values() []WakeMode {
	return []WakeMode{WakeModeAny, WakeModeNavigation, WakeModeNever}
}

// HostHeader is which Host header the server in a sandbox sees.
type HostHeader string

const (
	HostHeaderAuto     HostHeader = "auto"     // the preview's host unless the server rejects it
	HostHeaderRewrite  HostHeader = "rewrite"  // localhost:PORT
	HostHeaderPreserve HostHeader = "preserve" // the preview's host
)

// Values returns all values.
func (HostHeader) Values() []HostHeader {
	return []HostHeader{HostHeaderAuto, HostHeaderRewrite, HostHeaderPreserve}
}

// Protocol is the HTTP version that the server in a sandbox supports.
type Protocol string

const (
	ProtocolAuto  Protocol = "auto"  // h2c for gRPC and for servers that respond to HTTP/1.1 with HTTP/2
	ProtocolHTTP1 Protocol = "http1" // HTTP/1.1
	ProtocolH2C   Protocol = "h2c"   // HTTP/2 without TLS, with prior knowledge
)

// Values returns all protocols.
func (Protocol) Values() []Protocol { return []Protocol{ProtocolAuto, ProtocolHTTP1, ProtocolH2C} }

// WebSocketMode is whether idle WebSockets keep a sandbox awake.
type WebSocketMode string

const (
	WebSocketModeSleep     WebSocketMode = "sleep"      // they do not
	WebSocketModeKeepAwake WebSocketMode = "keep_awake" // they do
)

// Values returns all modes.
func (WebSocketMode) Values() []WebSocketMode {
	return []WebSocketMode{WebSocketModeSleep, WebSocketModeKeepAwake}
}

// PortList is the ports of a sandbox.
type PortList struct {
	Ports     []Port          `json:"ports" nullable:"false" doc:"Exposed ports"`
	Listening []ListeningPort `json:"listening" nullable:"false" doc:"Ports on which processes listen, as last known, at most 100; none while the sandbox is stopped"`
}

// ExposePortRequest exposes a port, or changes the modes of an exposed one.
type ExposePortRequest struct {
	Port        uint16        `json:"port" minimum:"1" maximum:"65535" doc:"TCP port inside the sandbox" example:"3000"`
	Access      Access        `json:"access,omitempty" default:"token" doc:"Which clients can open the preview. token: clients that know the token in its URL; public: clients that know the sandbox's id"`
	Wake        WakeMode      `json:"wake,omitempty" default:"navigation" doc:"Which requests wake the sandbox. any: all; navigation: all except prefetches wake one that is asleep, and only opening a page, and programs, start one that is stopped; never: none, they get 410 while it does not run"`
	HostHeader  HostHeader    `json:"host_header,omitempty" default:"auto" doc:"Which Host header the server sees. preserve: the preview's; rewrite: localhost:PORT; auto: the preview's unless the server rejects it"`
	Protocol    Protocol      `json:"protocol,omitempty" default:"auto" doc:"HTTP version that the server supports. h2c: HTTP/2 without TLS, such as for gRPC; http1: HTTP/1.1; auto: h2c for gRPC and for servers that respond to HTTP/1.1 with HTTP/2"`
	WebSocket   WebSocketMode `json:"websocket,omitempty" default:"sleep" doc:"Whether idle WebSockets keep the sandbox awake. sleep: no; keep_awake: yes"`
	WaitTimeout Duration      `json:"wait_timeout,omitempty" doc:"Time to wait for a process to listen on the port, at most 5m; waiting wakes the sandbox. Default: do not wait"`
}
