// An application in production: it knows that a proxy is in front of it.
const express = require("express");
const session = require("express-session");

const app = express();
app.set("trust proxy", 1);
app.use(session({ secret: "for tests", resave: false, saveUninitialized: false, cookie: { secure: true } }));
app.get("/form", (req, res) => res.send("form"));
app.post("/login", (req, res) => {
  req.session.user = "alice";
  res.redirect("/me");
});
app.get("/me", (req, res) => res.send("user " + req.session.user));
app.get("/oauth", (req, res) => {
  const back = encodeURIComponent(`${req.protocol}://${req.get("host")}/callback`);
  res.redirect("https://login.example/authorize?client_id=1&redirect_uri=" + back);
});
app.listen(process.env.PORT, "127.0.0.1");
