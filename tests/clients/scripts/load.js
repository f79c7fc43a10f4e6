// k6: two users, four chats, all of which must be answered. URL and MODEL come by `-e`.
import http from 'k6/http';
import { check } from 'k6';

export const options = { vus: 2, iterations: 4, thresholds: { checks: ['rate==1.0'] } };

export default function () {
  const messages = [{ role: 'user', content: 'Say hello.' }];
  const body = JSON.stringify({ model: __ENV.MODEL, messages, max_tokens: 4 });
  const headers = { 'Content-Type': 'application/json' };
  const answer = http.post(`${__ENV.URL}/v1/chat/completions`, body, { headers });
  check(answer, { answered: (a) => a.status === 200 && a.json('usage.completion_tokens') > 0 });
}
