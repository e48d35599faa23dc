package types

// ReadyCondition is when a background process is ready: exactly one of Port, Log, HTTP and
// Exit is set.
type ReadyCondition struct {
	Port    uint16     `json:"port,omitempty" minimum:"1" maximum:"65535" doc:"The process, or one that it started, listens on this TCP port, on any address" example:"3000"`
	Log     string     `json:"log,omitempty" maxLength:"1000" doc:"Regular expression in RE2 syntax that matches a line of the process's output since its last start, without colors and other escape sequences. Lines end after 8 KiB" example:"ready in \\d+ ms"`
	HTTP    *ReadyHTTP `json:"http,omitempty" doc:"A request is answered with a status"`
	Exit    bool       `json:"exit,omitempty" doc:"The process has ended" example:"true"`
	Timeout Duration   `json:"timeout,omitempty" doc:"Time to wait, at most 1h. Default: 1m"`
}

// ReadyHTTP is a GET request to http://localhost:PORT/PATH inside the sandbox, repeated until
// the status of the response, which is not followed if it is a redirect, is the wanted one.
type ReadyHTTP struct {
	Port   uint16 `json:"port" minimum:"1" maximum:"65535" doc:"TCP port on which the process listens" example:"3000"`
	Path   string `json:"path,omitempty" default:"/" maxLength:"2048" doc:"Path, with a query if needed" example:"/health"`
	Status string `json:"status,omitempty" default:"2xx" pattern:"^[1-5](xx|[0-9][0-9])$" patternDescription:"a status such as \"204\", or a class such as \"2xx\"" doc:"Status, or class of statuses, of the response" example:"2xx"`
}

// ReadyProcess is a background process for which a condition holds.
type ReadyProcess struct {
	Process   Process        `json:"process" doc:"The process"`
	Listening *ListeningPort `json:"listening,omitempty" doc:"With port and http: the port"`
	Line      string         `json:"line,omitempty" doc:"With log: the line that matches" example:"ready in 812 ms"`
	Match     []string       `json:"match,omitempty" nullable:"false" example:"ready in 812 ms,812" doc:"With log: the part of the line that matches, and then what the groups of the expression match, at most 16 texts"`
	Status    int            `json:"status,omitempty" doc:"With http: the status of the response"`
	WaitedMS  float64        `json:"waited_ms" doc:"How long the wait took, in milliseconds"`
}

// ListeningPort is a TCP port on which a process of a sandbox listens.
type ListeningPort struct {
	Port      uint16   `json:"port" doc:"TCP port inside the sandbox" example:"5173"`
	Addresses []string `json:"addresses" nullable:"false" doc:"Addresses on which the process listens, at most 4; 0.0.0.0 and :: are all"`
	PID       int      `json:"pid,omitempty" doc:"Process id inside the sandbox; missing if the process belongs to another user than root"`
	Program   string   `json:"program,omitempty" doc:"Name of the process's program" example:"node"`
	Process   string   `json:"process,omitempty" doc:"Id of the background process that it belongs to; missing for other commands" example:"p-k3f9x2m7"`
}
